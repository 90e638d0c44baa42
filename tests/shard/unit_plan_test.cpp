#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/shard/unit_plan.h>

namespace lockstep::shard {
namespace {

namespace nn = torch::nn;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using Names = std::vector<std::string>;

std::vector<Names> names_of(const std::vector<PlannedUnit>& units) {
  std::vector<Names> all;
  for (const PlannedUnit& unit : units) {
    Names& names = all.emplace_back();
    for (const NamedTensor& parameter : unit.parameters) names.push_back(parameter.name);
  }
  return all;
}

std::vector<Names> planned(const nn::Module& module, const UnitPolicy& policy = {}) {
  return names_of(plan_units(module, policy));
}

// Checks what holds for any plan: each parameter is in one unit, a unit has one kind of parameters,
// and no unit is empty.
void expect_sound(const nn::Module& module, const UnitPolicy& policy) {
  std::vector<const c10::TensorImpl*> seen;
  std::vector<std::string> unit_names;
  for (const PlannedUnit& unit : plan_units(module, policy)) {
    ASSERT_FALSE(unit.parameters.empty());
    EXPECT_FALSE(unit.name.empty());
    unit_names.push_back(unit.name);
    std::int64_t elements = 0;
    for (const NamedTensor& parameter : unit.parameters) {
      const at::Tensor& first = unit.parameters.front().tensor;
      EXPECT_EQ(parameter.tensor.scalar_type(), first.scalar_type());
      EXPECT_EQ(parameter.tensor.requires_grad(), first.requires_grad());
      EXPECT_EQ(parameter.tensor.device(), first.device());
      seen.push_back(parameter.tensor.unsafeGetTensorImpl());
      elements += parameter.tensor.numel();
    }
    EXPECT_EQ(unit.num_elements(), elements);
  }
  std::ranges::sort(unit_names);
  EXPECT_EQ(std::ranges::adjacent_find(unit_names), unit_names.end()) << "two units of one name";
  std::vector<const c10::TensorImpl*> all;
  for (const at::Tensor& parameter : module.parameters())
    all.push_back(parameter.unsafeGetTensorImpl());
  std::ranges::sort(all);
  all.erase(std::ranges::unique(all).begin(), all.end());
  std::ranges::sort(seen);
  EXPECT_EQ(seen, all);
}

// The outline of a transformer: an embedding, blocks, and a norm and head after them.
struct OutlineImpl : nn::Module {
  nn::Embedding words{nullptr};
  nn::ModuleList blocks;
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};
  explicit OutlineImpl(int num_blocks, std::int64_t width = 4) {
    words = register_module("words", nn::Embedding(3, width));
    register_module("blocks", blocks);
    for (int block = 0; block < num_blocks; ++block)
      blocks->push_back(nn::Sequential(nn::Linear(width, 2 * width), nn::Linear(2 * width, width)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    head = register_module("head", nn::Linear(nn::LinearOptions(width, 3).bias(false)));
  }
};
TORCH_MODULE(Outline);

TEST(UnitPlan, BlocksOfAListAreUnits) {
  const Outline model(3);
  expect_sound(*model, {});
  EXPECT_THAT(
      planned(*model),
      IsSupersetOf(
          {Names{"blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight", "blocks.0.1.bias"},
           Names{"blocks.2.0.weight", "blocks.2.0.bias", "blocks.2.1.weight", "blocks.2.1.bias"}}));
  const auto units = plan_units(*model, {});
  EXPECT_TRUE(std::ranges::any_of(units, [](const PlannedUnit& unit) {
    return unit.name.find("blocks.1") != unit.name.npos;
  })) << "a unit is called as its module";
}

TEST(UnitPlan, BlocksOfASequentialAreUnits) {
  const nn::Sequential model(nn::Linear(2, 2), nn::ReLU(), nn::Linear(2, 2));
  EXPECT_THAT(planned(*model),
              ElementsAre(Names{"0.weight", "0.bias"}, Names{"2.weight", "2.bias"}));
}

TEST(UnitPlan, ContainersInsideOfContainers) {
  // There are two stages of blocks: on whichever level units are made, every block is in one unit.
  const nn::ModuleList model(nn::Sequential(nn::Linear(2, 2), nn::Linear(2, 2)),
                             nn::Sequential(nn::Linear(2, 2), nn::Linear(2, 2)));
  expect_sound(*model, {});
  EXPECT_GE(plan_units(*model, {}).size(), 2u);

  // The blocks are below a module that is no container of repeated blocks.
  const auto outer = std::make_shared<nn::Module>("outer");
  outer->register_module("inner", Outline(2));
  expect_sound(*outer, {});
  EXPECT_THAT(planned(*outer),
              IsSupersetOf({Names{"inner.blocks.0.0.weight", "inner.blocks.0.0.bias",
                                  "inner.blocks.0.1.weight", "inner.blocks.0.1.bias"}}));
}

TEST(UnitPlan, LeftoversAreGroupedUpToTheLargestUnit) {
  const Outline model(2);
  const auto units = plan_units(*model, {});
  std::int64_t largest_block = 0;
  for (const PlannedUnit& unit : units)
    if (unit.parameters.front().name.starts_with("blocks."))
      largest_block = std::max(largest_block, unit.num_elements());
  ASSERT_GT(largest_block, 0);
  std::int64_t num_leftovers = 0;
  for (const PlannedUnit& unit : units) {
    if (unit.parameters.front().name.starts_with("blocks.")) continue;
    ++num_leftovers;
    EXPECT_LE(unit.num_elements(), largest_block);
  }
  // The embedding, the norm and the head together are smaller than a block.
  EXPECT_EQ(num_leftovers, 1);
}

TEST(UnitPlan, ALeftoverLargerThanAnyUnitIsOneByItself) {
  const auto model = std::make_shared<nn::Module>();
  model->register_module("blocks", nn::Sequential(nn::Linear(2, 2), nn::Linear(2, 2)));
  model->register_module("a", nn::Linear(nn::LinearOptions(1, 4).bias(false)));
  model->register_module("table", nn::Embedding(50, 4));
  model->register_module("b", nn::Linear(nn::LinearOptions(1, 4).bias(false)));
  expect_sound(*model, {});
  EXPECT_THAT(planned(*model), ::testing::Contains(Names{"table.weight"}));
}

TEST(UnitPlan, WithoutBlocksAnEighthOfTheModelEach) {
  const auto model = std::make_shared<nn::Module>();
  for (int number = 0; number < 16; ++number)
    model->register_parameter("p" + std::to_string(number), at::zeros({10}));
  expect_sound(*model, {});
  const auto units = plan_units(*model, {});
  EXPECT_EQ(units.size(), 8u);
  for (const PlannedUnit& unit : units) EXPECT_EQ(unit.num_elements(), 20);
  EXPECT_EQ(names_of(units).front(), (Names{"p0", "p1"})) << "in the model's order";
}

TEST(UnitPlan, TiedWeightsAreInTheFirstUnitThatHasThem) {
  const nn::Linear layer(2, 2);
  nn::Linear tied(2, 2);
  tied->weight = tied->register_parameter("again", layer->weight);
  const nn::Sequential model(layer, tied, layer);
  expect_sound(*model, {});
  int num_seen = 0;
  for (const PlannedUnit& unit : plan_units(*model, {}))
    for (const NamedTensor& parameter : unit.parameters)
      if (parameter.tensor.is_same(layer->weight)) {
        ++num_seen;
        EXPECT_EQ(parameter.name, "0.weight");
      }
  EXPECT_EQ(num_seen, 1);
}

TEST(UnitPlan, DtypesAndFrozenPartsAreKeptApart) {
  Outline model(2);
  model->blocks[0]->to(at::kDouble);
  for (at::Tensor& parameter : model->blocks[1]->parameters()) parameter.requires_grad_(false);
  model->norm->weight.requires_grad_(false);
  for (const UnitPolicy& policy : {UnitPolicy(), one_unit(), units_of_size(1),
                                   units_of_types<nn::LinearImpl>(), units_named({"blocks"})})
    expect_sound(*model, policy);
}

TEST(UnitPlan, ByType) {
  const Outline model(1);
  const auto units = planned(*model, units_of_types<nn::Linear, nn::EmbeddingImpl>());
  EXPECT_THAT(units, IsSupersetOf({Names{"words.weight"}, Names{"head.weight"},
                                   Names{"blocks.0.0.weight", "blocks.0.0.bias"}}));
  expect_sound(*model, units_of_types<nn::Linear, nn::Embedding>());
  // No module has that type, so everything is left over.
  expect_sound(*model, units_of_types<nn::BatchNorm1dImpl>());
}

TEST(UnitPlan, BySize) {
  const Outline model(2);  // each block: 4·8 + 8 + 8·4 + 4 = 76, halves of 40 and 36
  const auto fine = planned(*model, units_of_size(36));
  EXPECT_THAT(fine, IsSupersetOf({Names{"blocks.0.0.weight", "blocks.0.0.bias"},
                                  Names{"blocks.0.1.weight", "blocks.0.1.bias"}}));
  const auto coarse = planned(*model, units_of_size(76));
  EXPECT_THAT(coarse, IsSupersetOf({Names{"blocks.1.0.weight", "blocks.1.0.bias",
                                          "blocks.1.1.weight", "blocks.1.1.bias"}}));
  for (const std::int64_t size : {1, 36, 37, 76, 77, 152, 100'000})
    expect_sound(*model, units_of_size(size));
}

TEST(UnitPlan, ASmallModuleIsDividedAmongItsChildren) {
  const Outline model(2);
  UnitPolicy policy = units_of_types<nn::SequentialImpl, nn::LinearImpl>();
  policy.min_num_params = 77;
  expect_sound(*model, policy);
  for (const Names& unit : planned(*model, policy))
    EXPECT_NE(unit, (Names{"blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight",
                           "blocks.0.1.bias"}))
        << "a block of 76 was made a unit";
}

TEST(UnitPlan, Named) {
  const Outline model(2);
  EXPECT_THAT(planned(*model, units_named({"head", "blocks"})),
              IsSupersetOf({Names{"head.weight"},
                            Names{"blocks.0.0.weight", "blocks.0.0.bias", "blocks.0.1.weight",
                                  "blocks.0.1.bias", "blocks.1.0.weight", "blocks.1.0.bias",
                                  "blocks.1.1.weight", "blocks.1.1.bias"}}));
  expect_sound(*model, units_named({"head", "blocks.1"}));
}

TEST(UnitPlan, ANameThatTheModelHasNotIsAnError) {
  const Outline model(2);
  try {
    plan_units(*model, units_named({"blocks.0", "blocks.7", "tail"}));
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("blocks.7"));
    EXPECT_THAT(error.what(), HasSubstr("tail"));
    EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("'blocks.0'")));
  }
}

// A module inside of another named module is no mistake, although it gets no unit of its own.
TEST(UnitPlan, ANameInsideOfAnotherIsNoError) {
  const Outline model(2);
  expect_sound(*model, units_named({"blocks", "blocks.0"}));
}

// One policy is used for several models.
TEST(UnitPlan, APolicyOfNamesServesSeveralModels) {
  const UnitPolicy policy = units_named({"blocks.1"});
  expect_sound(*Outline(2), policy);
  EXPECT_THROW(plan_units(*Outline(1), policy), UsageError);
  expect_sound(*Outline(3), policy);
}

TEST(UnitPlan, OneUnit) {
  const Outline model(2);
  EXPECT_EQ(plan_units(*model, one_unit()).size(), 1u);
  EXPECT_THAT(planned(*nn::Sequential(), one_unit()), IsEmpty());
  expect_sound(*model, one_unit());
}

TEST(UnitPlan, TheModuleItselfCanBeAUnit) {
  const nn::Linear model(2, 2);
  EXPECT_THAT(planned(*model, units_of_types<nn::LinearImpl>()),
              ElementsAre(Names{"weight", "bias"}));
  EXPECT_THAT(planned(*model), ::testing::SizeIs(::testing::Ge(1)));
  expect_sound(*model, {});
}

TEST(UnitPlan, AParameterOfNoElementsHasAPlace) {
  const auto model = std::make_shared<nn::Module>();
  model->register_parameter("none", at::zeros({0, 3}));
  model->register_parameter("some", at::zeros({3}));
  expect_sound(*model, {});
}

}  // namespace
}  // namespace lockstep::shard
