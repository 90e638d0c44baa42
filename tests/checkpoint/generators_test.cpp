#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/generators.h>

#include "../base/errors.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::HasSubstr;

TEST(Generators, DrawWhatTheyWouldHaveDrawn) {
  at::randn({7});  // leaves a half-used pair of normal numbers behind
  const GeneratorStates states = generator_states(at::kCPU);
  const at::Tensor expected = at::randn({100});
  at::randn({11});
  restore_generators(states, at::kCPU);
  EXPECT_TRUE(at::equal(at::randn({100}), expected));
  EXPECT_THAT(usage_error([&] {
                restore_generators({{"cpu", {std::byte{1}}}}, at::kCPU);
              }),
              HasSubstr("generator 'cpu' (1 bytes)"));
}

TEST(Generators, OfAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this LibTorch has no CUDA";
  const at::Device device(at::kCUDA, 0);
  at::randn({7}, device);
  const GeneratorStates states = generator_states(device);
  const at::Tensor expected = at::randn({100}, device);
  const at::Tensor on_host = at::randn({100});
  restore_generators(states, device);
  EXPECT_TRUE(at::equal(at::randn({100}, device), expected));
  EXPECT_TRUE(at::equal(at::randn({100}), on_host));
}

}  // namespace
}  // namespace lockstep::checkpoint
