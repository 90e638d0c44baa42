// The message in which a rank tells the next one the shapes, and messages that no rank can have
// sent.
#include <cstdint>
#include <functional>
#include <limits>
#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/messages.h>

#include "tests/base/errors.h"

namespace lockstep::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Numbers = std::vector<std::int64_t>;

constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

std::string refusal(const Numbers& numbers) {
  const auto [fault, text] = comm_error([&] { shape_from(numbers, "stages, 0 to 1"); });
  EXPECT_EQ(fault, Fault::corrupted);
  EXPECT_THAT(text, HasSubstr("stages, 0 to 1"));
  return text;
}

TEST(BoundaryShape, IsReadAsItWasTold) {
  std::vector<at::Tensor> tensors;
  EXPECT_EQ(shape_from(to_numbers(shape_of(tensors)), "g"), shape_of(tensors));
  for (int i = 0; i < 200; ++i) {
    tensors.push_back(at::empty({i, 2}).requires_grad_(i % 3 == 0));
    tensors.push_back(at::empty({}, at::kDouble));
    tensors.push_back(at::empty({1, 0, 3, 1, i}, at::kBool));
  }
  EXPECT_EQ(shape_from(to_numbers(shape_of(tensors)), "g"), shape_of(tensors));
  EXPECT_EQ(shape_of(tensors).entries.size(), 600U);
}

TEST(BoundaryShape, OfWrongCountsIsRefused) {
  constexpr auto kFloats = static_cast<std::int64_t>(at::kFloat);
  const Numbers good = {1, kFloats, 1, 2, 4, 5};
  EXPECT_EQ(shape_from(good, "g").text(), "Float [4, 5] with a gradient");
  const auto with = [&](std::size_t place, std::int64_t number) {
    Numbers numbers = good;
    numbers[place] = number;
    return refusal(numbers);
  };
  EXPECT_THAT(refusal({}), HasSubstr("the number of tensors is missing"));
  for (const std::int64_t count : {kLargest, std::int64_t{2}, std::int64_t{-1}})
    EXPECT_THAT(
        with(0, count),
        HasSubstr(fmt::format("the number of tensors is {}, and there can be 0 to 1", count)));
  EXPECT_THAT(with(0, 0), HasSubstr("5 numbers are left behind the last of 0 tensors"));
  for (const std::int64_t type : {kLargest, std::int64_t{-1}})
    EXPECT_THAT(with(1, type), HasSubstr(fmt::format("a tensor's type is {}", type)));
  EXPECT_THAT(with(1, static_cast<std::int64_t>(at::ScalarType::Undefined)), HasSubstr("type"));
  EXPECT_THAT(with(2, 2), HasSubstr("whether a tensor wants a gradient is 2"));
  for (const std::int64_t dims : {kLargest, std::int64_t{3}, std::int64_t{-1}})
    EXPECT_THAT(with(3, dims), HasSubstr(fmt::format("number of dims is {}", dims)));
  EXPECT_THAT(with(3, 1), HasSubstr("1 numbers are left"));
  EXPECT_THAT(with(4, -1), HasSubstr("a tensor's size is -1"));
  // The product of the sizes has to be one that memory can have.
  EXPECT_THAT(with(4, kLargest / 4), HasSubstr("a tensor's size is 5"));
  EXPECT_THAT(with(4, kLargest), HasSubstr("a tensor's size is"));
  Numbers shorter = good;
  for (; !shorter.empty(); shorter.pop_back()) {
    if (shorter.size() == good.size()) continue;
    refusal(shorter);
  }
}

// Never reads beyond the message, whatever is in it.
TEST(BoundaryShape, OfAnyNumbersIsReadOrRefused) {
  std::mt19937 random(5);
  int num_read = 0;
  for (int round = 0; round < 20'000; ++round) {
    Numbers numbers(random() % 12);
    for (std::int64_t& number : numbers)
      number = static_cast<std::int64_t>(random() % 8) - (random() % 16 == 0 ? 4 : 0);
    try {
      EXPECT_EQ(to_numbers(shape_from(numbers, "g")), numbers);
      ++num_read;
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::corrupted);
    }
  }
  EXPECT_GT(num_read, 100);
}

TEST(BoundaryShape, ACountThatNoShapeHasTakesNoMemory) {
  EXPECT_EQ(checked_count(1, "g"), 1);
  EXPECT_EQ(checked_count(100'000, "g"), 100'000);
  for (const std::int64_t count : {std::int64_t{0}, std::int64_t{-5}, kLargest}) {
    const auto [fault, text] = comm_error([&] { checked_count(count, "stages"); });
    EXPECT_EQ(fault, Fault::corrupted);
    EXPECT_THAT(text, AllOf(HasSubstr("stages"), HasSubstr(std::to_string(count))));
  }
}

}  // namespace
}  // namespace lockstep::pipeline
