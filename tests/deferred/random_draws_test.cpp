// Every deferred random operator leaves the generator in the state that the operator itself would,
// for any size.
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <lockstep/deferred/construction.h>

#include "same_bits.h"

namespace lockstep::deferred {
namespace {

using testing::generator_state;
using testing::same_bits;

struct Case {
  std::string name;
  std::function<void(at::Tensor)> fill;
  std::vector<at::ScalarType> types;
};

const std::vector<at::ScalarType> kReals = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
const std::vector<at::ScalarType> kNumbers = {at::kFloat, at::kDouble, at::kLong, at::kInt,
                                              at::kByte};

class RandomDraw : public ::testing::TestWithParam<Case> {};

TEST_P(RandomDraw, MovesTheGeneratorOnAsItWouldHave) {
  const auto& [name, fill, types] = GetParam();
  for (const at::ScalarType type : types)
    for (const std::int64_t numel :
         {1, 15, 16, 17, 319, 320, 321, 335, 383, 384, 1000, 5003, 65553})
      for (const bool after_one : {false, true}) {
        torch::manual_seed(3);
        if (after_one) at::randn({1});  // leaves the second of a pair of numbers for later
        const at::Tensor plain = at::empty({numel}, type);
        fill(plain);
        const std::string after = generator_state();

        torch::manual_seed(3);
        if (after_one) at::randn({1});
        Construction construction({.smallest_bytes = 1});
        const at::Tensor deferred = construction.construct([&] {
          at::Tensor tensor = at::empty({numel}, type);
          fill(tensor);
          return tensor;
        });
        ASSERT_TRUE(construction.is_deferred(deferred));
        EXPECT_TRUE(generator_state() == after) << type << ' ' << numel;
        at::rand({10});
        EXPECT_TRUE(same_bits(deferred, plain)) << type << ' ' << numel;
      }
}

INSTANTIATE_TEST_SUITE_P(
    Operators, RandomDraw,
    ::testing::Values(
        Case{"uniform", [](at::Tensor t) { t.uniform_(-2, 3); }, kReals},
        Case{"normal", [](at::Tensor t) { t.normal_(1, 2); }, kReals},
        Case{"random", [](at::Tensor t) { t.random_(); }, kNumbers},
        Case{"random_up_to", [](at::Tensor t) { t.random_(100); }, kNumbers},
        Case{"random_64_bits",
             [](at::Tensor t) { t.random_(-5, std::int64_t{1} << 40); },
             {at::kLong, at::kDouble}},
        Case{"exponential", [](at::Tensor t) { t.exponential_(2); }, {at::kFloat, at::kDouble}},
        Case{"cauchy", [](at::Tensor t) { t.cauchy_(); }, {at::kFloat, at::kDouble}},
        Case{"log_normal", [](at::Tensor t) { t.log_normal_(); }, {at::kFloat, at::kDouble}},
        Case{"geometric", [](at::Tensor t) { t.geometric_(0.25); }, kNumbers},
        Case{"bernoulli", [](at::Tensor t) { t.bernoulli_(0.25); }, kNumbers}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace lockstep::deferred
