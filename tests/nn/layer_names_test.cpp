#include <lockstep/nn/tensor_parallel/tensor_plan.h>

#include <gtest/gtest.h>

namespace lockstep::nn {
namespace {

TEST(LayerNames, AStarStandsForARunWithoutADot) {
  EXPECT_TRUE(matches_layer("blocks.*.fc1", "blocks.12.fc1"));
  EXPECT_FALSE(matches_layer("blocks.*.fc1", "blocks.12.mlp.fc1"));
  EXPECT_TRUE(matches_layer("*_proj", "q_proj"));
  EXPECT_TRUE(matches_layer("fc*", "fc"));
}

TEST(LayerNames, AStarAloneIsAnyChildAndNotTheModel) {
  EXPECT_TRUE(matches_layer("*", "fc1"));
  EXPECT_FALSE(matches_layer("*", "block.fc1"));
  EXPECT_FALSE(matches_layer("*", ""));
  EXPECT_TRUE(matches_layer("", ""));
  EXPECT_FALSE(matches_layer("", "fc1"));
}

}  // namespace
}  // namespace lockstep::nn
