// Optimizers by their names in configs, and one that a program adds.
#include <lockstep/optim/registry/registry.h>

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/optim/registry/optimizers.h>

#include "../base/errors.h"

namespace lockstep::optim {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

OptimizerOptions options_of(const std::string& name) {
  for (const OptimizerType& type : optimizer_types())
    for (const std::string& one : type.names)
      if (one == name) return type.options;
  ADD_FAILURE() << "no optimizer is called " << name;
  return AdamWOptions{};
}

TEST(OptimizerTypes, AreCalledAsDeepSpeedCallsThem) {
  for (const char* name : {"AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"})
    EXPECT_NE(options_of(name).as<AdamWOptions>(), nullptr) << name;
  for (const char* name : {"AdamW8bit", "Adam8bit"})
    EXPECT_NE(options_of(name).as<AdamW8bitOptions>(), nullptr) << name;
  for (const char* name : {"Lion", "FusedLion", "DeepSpeedCPULion"})
    EXPECT_NE(options_of(name).as<LionOptions>(), nullptr) << name;
  for (const char* name : {"Adagrad", "DeepSpeedCPUAdagrad"})
    EXPECT_NE(options_of(name).as<AdagradOptions>(), nullptr) << name;
  for (const char* name : {"Lamb", "FusedLamb"})
    EXPECT_NE(options_of(name).as<LambOptions>(), nullptr) << name;
  EXPECT_NE(options_of("SGD").as<SGDOptions>(), nullptr);
  EXPECT_EQ(options_of("SGD").as<AdamWOptions>(), nullptr);
  EXPECT_EQ(name_of(AdamWOptions{}), "AdamW");
  EXPECT_NE(options_of("Muon").as<MuonOptions>(), nullptr);
  EXPECT_EQ(name_of(LambOptions{}), "Lamb");
  EXPECT_EQ(name_of(MuonOptions{}), "Muon");
}

// The bytes that the planner counts for each parameter.
TEST(OptimizerTypes, SayHowManyBytesTheirStateHas) {
  EXPECT_EQ(OptimizerOptions(AdamWOptions{}).state_bytes(), 8);
  EXPECT_EQ(OptimizerOptions(AdamW8bitOptions{}).state_bytes(), 2.03125);
  // Checkpoints have floats.
  EXPECT_EQ(OptimizerOptions(AdamW8bitOptions{}).saved_state_bytes(), 8);
  EXPECT_EQ(OptimizerOptions(AdamWOptions{}).saved_state_bytes(), std::nullopt);
  EXPECT_EQ(OptimizerOptions(SGDOptions{}).state_bytes(), 0);
  EXPECT_EQ(OptimizerOptions(SGDOptions{.momentum = 0.5}).state_bytes(), 4);
  EXPECT_EQ(OptimizerOptions(LionOptions{}).state_bytes(), 4);
  EXPECT_EQ(OptimizerOptions(AdagradOptions{}).state_bytes(), 4);
  EXPECT_EQ(OptimizerOptions(LambOptions{}).state_bytes(), 8);
  EXPECT_EQ(OptimizerOptions(LambOptions{}).matrix_state_bytes(), 8);
  EXPECT_EQ(OptimizerOptions(MuonOptions{}).state_bytes(), 8);
  EXPECT_EQ(OptimizerOptions(MuonOptions{}).matrix_state_bytes(), 4);
}

TEST(OptimizerTypes, SayWhatAStepSees) {
  EXPECT_EQ(OptimizerOptions(LionOptions{}).kind(), StepKind::elementwise);
  EXPECT_EQ(OptimizerOptions(AdamW8bitOptions{}).kind(), StepKind::blocks);
  EXPECT_EQ(OptimizerOptions(LambOptions{}).kind(), StepKind::norm_per_parameter);
  EXPECT_EQ(OptimizerOptions(MuonOptions{}).kind(), StepKind::whole_matrices);
}

// Changes every number to another one within its range.
class Changing final : public OptionKeys {
 public:
  void number(const OptionKey&, double& value, const NumberRange& range) override {
    value = range.lowest + 0.5 * (std::isfinite(range.highest) ? range.highest - range.lowest : 1);
  }
  void two_numbers(const OptionKey&, std::array<double, 2>& values, const NumberRange&) override {
    values = {0.25, 0.75};
  }
  void number(const OptionKey&, std::optional<double>& value, const NumberRange& range) override {
    value = range.lowest;
  }
  void integer(const OptionKey&, std::int64_t& value, const CountRange& range) override {
    value = range.lowest;
  }
  void integer(const OptionKey&, std::optional<std::int64_t>& value,
               const CountRange& range) override {
    value = range.lowest;
  }
  void choice(const OptionKey&, std::size_t& chosen,
              const std::vector<std::string_view>& names) override {
    chosen = names.size() - 1 - chosen;
  }
  void boolean(const OptionKey&, bool& value) override { value = !value; }
};

TEST(OptimizerOptions, AreAValueThatCanBeWalkedThrough) {
  for (const OptimizerType& type : optimizer_types()) {
    OptimizerOptions changed = type.options;
    Changing changes;
    changed.describe(changes);
    const auto before = texts_of(type.options), after = texts_of(changed);
    ASSERT_EQ(before.size(), after.size());
    ASSERT_FALSE(before.empty()) << type.names.front();
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_EQ(before[i].key, after[i].key);
      EXPECT_NE(before[i].value, after[i].value) << type.names.front() << ": " << before[i].key;
    }
    EXPECT_EQ(texts_of(type.options), before);
  }
}

TEST(OptimizerOptions, AreTexts) {
  EXPECT_THAT(texts_of(SGDOptions{.momentum = 0.5}),
              ElementsAre(OptionText{"momentum", "0.5"}, OptionText{"dampening", "0"},
                          OptionText{"nesterov", "false"}));
  EXPECT_THAT(texts_of(LionOptions{}), ElementsAre(OptionText{"betas", "0.9, 0.99"}));
}

TEST(HiddenMatrices, AreToldByNameAndShape) {
  const auto is_one = [](const char* name, std::vector<std::int64_t> shape) {
    return is_hidden_matrix(name, shape);
  };
  EXPECT_TRUE(is_one("transformer.h.0.attn.c_attn.weight", {3, 2}));
  EXPECT_TRUE(is_one("convolution.weight", {8, 3, 5, 5}));
  EXPECT_FALSE(is_one("transformer.h.0.ln_1.weight", {3}));
  EXPECT_FALSE(is_one("scale", {}));
  EXPECT_FALSE(is_one("mlp.weight", {0, 4}));
  for (const char* name : {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight",
                           "model.embed_tokens.weight", "Embedding.weight"})
    EXPECT_FALSE(is_one(name, {3, 2})) << name;
}

// The name "AdamW" means decoupled decay; the same options without a name, or as "Adam", may be
// coupled.
TEST(OptimizerOptions, AreJudgedByTheNameThatAConfigHas) {
  const OptimizerOptions coupled = AdamWOptions{.decay = AdamDecay::coupled};
  EXPECT_EQ(coupled.mistakes("AdamW").size(), 1u);
  EXPECT_THAT(coupled.mistakes("Adam"), IsEmpty());
  check_options("AdamW", coupled);
}

struct MineOptions {
  double push = 0.5;

  static constexpr StepKind kKind = StepKind::elementwise;
  void describe(OptionKeys& keys) { keys.number({.name = "push"}, push, {.highest = 2}); }
  std::vector<std::string> state_names() const { return {"a", "b", "c"}; }
};

TEST(OptimizerTypes, TakeAProgramsOwn) {
  register_optimizer_type({{"Mine", "DeepSpeedMine"}, MineOptions{}});
  EXPECT_EQ(options_of("DeepSpeedMine").state_bytes(), 12);
  EXPECT_EQ(name_of(MineOptions{}), "Mine");
  EXPECT_THAT(usage_error([] { check_options("Mine", MineOptions{.push = 3}); }),
              HasSubstr("Mine: push is 3; it must be at least 0 and at most 2"));
  EXPECT_THAT(usage_error([] {
                register_optimizer_type({{"New", "adamw"}, MineOptions{}});
              }),
              HasSubstr("registered as 'adamw', which another one is called"));
  EXPECT_THAT(usage_error([] {
                register_optimizer_type({{}, MineOptions{}});
              }),
              HasSubstr("without a name"));
  for (const OptimizerType& type : optimizer_types())
    EXPECT_THAT(type.names, ::testing::Not(Contains("New")));
}

}  // namespace
}  // namespace lockstep::optim
