#include <gtest/gtest.h>

#include <lockstep/parallel/shard/parameter_gatherer.h>

namespace lockstep::shard {
namespace {

// The predictions of note() for each unit of a step.
std::vector<int> predictions(UseOrder& order, const std::vector<std::size_t>& step) {
  std::vector<int> all;
  for (const std::size_t unit : step) {
    const auto next = order.note(unit);
    all.push_back(next ? static_cast<int>(*next) : -1);
  }
  return all;
}

using Units = std::vector<int>;

TEST(UseOrder, KnowsNothingInTheFirstStep) {
  UseOrder order;
  EXPECT_EQ(order.start_over(), std::nullopt);
  EXPECT_EQ(predictions(order, {0, 1, 2, 1, 0}), (Units{-1, -1, -1, -1, -1}));
}

TEST(UseOrder, FollowsTheLastStep) {
  UseOrder order;
  predictions(order, {0, 1, 2, 1, 0});
  for (int step = 0; step < 3; ++step) {
    EXPECT_EQ(order.start_over(), std::size_t{0});
    // On the way back, the same unit is followed by another one.
    EXPECT_EQ(predictions(order, {0, 1, 2, 1, 0}), (Units{1, 2, 1, 0, -1}));
  }
}

TEST(UseOrder, FindsItsPlaceAgain) {
  UseOrder order;
  predictions(order, {0, 1, 2, 3, 2, 0});
  order.start_over();
  // Unit 1 is left out; the rest of the order stays.
  EXPECT_EQ(predictions(order, {0, 2, 3, 2, 0}), (Units{1, 3, 2, 0, -1}));
  EXPECT_EQ(order.start_over(), std::size_t{0});
  EXPECT_EQ(predictions(order, {0, 2, 3, 2, 0}), (Units{2, 3, 2, 0, -1}));
}

TEST(UseOrder, AUnitNobodyKnowsIsStepped) {
  UseOrder order;
  predictions(order, {0, 1, 2});
  order.start_over();
  const Units got = predictions(order, {0, 7, 1, 2});
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[2], 2);
}

TEST(UseOrder, AStepThatUsesNothingTeachesNothingWrong) {
  UseOrder order;
  predictions(order, {4, 5});
  order.start_over();
  const auto first = order.start_over();
  EXPECT_TRUE(!first.has_value() || *first == 4);
  predictions(order, {4, 5});
  EXPECT_EQ(order.start_over(), std::size_t{4});
  EXPECT_EQ(predictions(order, {4, 5}), (Units{5, -1}));
}

}  // namespace
}  // namespace lockstep::shard
