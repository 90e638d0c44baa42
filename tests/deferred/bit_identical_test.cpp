// Compares every parameter and buffer, and the generator, with plain construction.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/deferred/construction.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "models.h"
#include "same_bits.h"

namespace lockstep::deferred {
namespace {

using testing::generator_state;
using testing::Model;
using testing::same_bits;

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

std::vector<NamedTensor> tensors_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : module.named_parameters()) tensors.push_back({item.key(), item.value()});
  for (const auto& item : module.named_buffers()) tensors.push_back({item.key(), item.value()});
  return tensors;
}

// Runs with the usual options, and with all tensors deferred, however small.
class BitIdentical : public ::testing::TestWithParam<std::tuple<Model, std::size_t>> {
 protected:
  BitIdentical() {
    torch::manual_seed(11);
    torch::rand({5});  // leaves the generator in the middle of a block
    torch::randn({1});
    const at::Tensor state = at::detail::getDefaultCPUGenerator().get_state();
    plain_ = model().make();
    state_after_ = generator_state();
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    generator.set_state(state);
    deferred_ = construction_.construct(model().make);
  }

  static const Model& model() { return std::get<0>(GetParam()); }

  void expect_same(std::size_t i) {
    const NamedTensor expected = tensors_of(*plain_)[i];
    const NamedTensor tensor = tensors_of(*deferred_)[i];
    ASSERT_EQ(tensor.name, expected.name);
    EXPECT_TRUE(same_bits(tensor.tensor, expected.tensor)) << expected.name;
  }

  void materialise_and_compare(std::size_t i) {
    const auto values = construction_.materialise(std::array{tensors_of(*deferred_)[i].tensor});
    expect_same(i);
  }

  std::size_t num_tensors() const { return tensors_of(*plain_).size(); }

  Construction construction_{{.smallest_bytes = std::get<1>(GetParam())}};
  std::shared_ptr<torch::nn::Module> plain_, deferred_;
  std::string state_after_;
};

TEST_P(BitIdentical, TheGeneratorIsWherePlainConstructionLeavesIt) {
  EXPECT_TRUE(generator_state() == state_after_);
}

TEST_P(BitIdentical, LargeTensorsTakeNoMemory) {
  if (!model().all_deferred) return;
  EXPECT_EQ(construction_.bytes(), 0);
  for (const auto& [name, tensor] : tensors_of(*deferred_)) {
    const bool is_large = tensor.nbytes() >= (64 << 10);
    EXPECT_TRUE(!is_large || construction_.is_deferred(tensor)) << name;
  }
}

TEST_P(BitIdentical, InOrder) {
  ASSERT_EQ(tensors_of(*deferred_).size(), num_tensors());
  for (std::size_t i = 0; i < num_tensors(); ++i) materialise_and_compare(i);
  EXPECT_TRUE(generator_state() == state_after_);
}

TEST_P(BitIdentical, InReverse) {
  for (std::size_t i = num_tensors(); i-- > 0;) materialise_and_compare(i);
  // Repeats it: nothing was used up.
  for (std::size_t i = num_tensors(); i-- > 0;) materialise_and_compare(i);
  EXPECT_TRUE(generator_state() == state_after_);
}

TEST_P(BitIdentical, SomeOfThem) {
  for (std::size_t i = num_tensors() / 2; i < num_tensors(); i += 2) materialise_and_compare(i);
}

TEST_P(BitIdentical, AllAtOnce) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : tensors_of(*deferred_)) tensors.push_back(tensor);
  construction_.keep(tensors);
  for (std::size_t i = 0; i < num_tensors(); ++i) {
    expect_same(i);
    EXPECT_FALSE(construction_.is_deferred(tensors[i]));
  }
}

// A held value is not the one from which others were computed, if it changed after that.
TEST_P(BitIdentical, WhileOthersAreHeld) {
  std::vector<Materialised> held;
  const auto hold = [&](std::size_t i) {
    held.push_back(construction_.materialise(std::array{tensors_of(*deferred_)[i].tensor}));
  };
  for (std::size_t i = 0; i < num_tensors(); ++i) {
    hold(i);
    for (std::size_t k = 0; k <= i; ++k) expect_same(k);
  }
  held.clear();
  for (std::size_t i = num_tensors(); i-- > 0;) {
    hold(i);
    for (std::size_t k = i; k < num_tensors(); ++k) expect_same(k);
  }
}

TEST_P(BitIdentical, WithoutBeingAskedFor) {
  for (std::size_t i = 0; i < num_tensors(); ++i) expect_same(i);
}

std::string test_name(const ::testing::TestParamInfo<BitIdentical::ParamType>& info) {
  std::string name = std::get<0>(info.param).name;
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name + (std::get<1>(info.param) == 1 ? "_all" : "_large");
}

INSTANTIATE_TEST_SUITE_P(Models, BitIdentical,
                         ::testing::Combine(::testing::ValuesIn(testing::models()),
                                            ::testing::Values(1, 64 << 10)),
                         test_name);

}  // namespace
}  // namespace lockstep::deferred
