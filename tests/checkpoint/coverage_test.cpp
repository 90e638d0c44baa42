#include <chrono>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/manifest.h>

#include "../base/errors.h"

namespace lockstep::checkpoint {
namespace {

using mesh::Interval;
using mesh::Placement;
using ::testing::HasSubstr;

TensorRecord held_in(std::vector<std::int64_t> shape, const std::vector<Placement>& placements) {
  TensorRecord tensor{DType::f32, std::move(shape), {}};
  for (const Placement& placement : placements) tensor.pieces.push_back({"f", placement, {}});
  return tensor;
}

// The pieces have as many elements as the tensor, but one element is in none of them.
TEST(Coverage, WhatIsHeldTwiceFillsNoHole) {
  const Placement whole = Placement::full({10});
  const auto part = [&](std::int64_t begin, std::int64_t end) {
    return whole.cut_flat(Interval{begin, end});
  };
  EXPECT_EQ(covered_elements(held_in({10}, {part(0, 6), part(5, 9)})), 9);
  EXPECT_EQ(covered_elements(held_in({10}, {part(4, 10), part(0, 4)})), 10);
  EXPECT_EQ(covered_elements(held_in({10}, {part(0, 10), part(2, 5)})), 10);
  EXPECT_EQ(covered_elements(held_in({10}, {})), 0);
  Manifest manifest;
  manifest.tensors["w"] = held_in({10}, {part(0, 6), part(5, 9)});
  EXPECT_THROW(check_complete(manifest, "it"), DamagedCheckpoint);
  EXPECT_THAT(usage_error([&] { check_complete(manifest, "it"); }),
              HasSubstr("of the 10 elements of 'w' there are 9"));
}

// Boxes and ranges of all kinds, counted one element at a time.
TEST(Coverage, IsThatOfTheElements) {
  const Placement whole = Placement::full({6, 4});
  const Placement left = whole.cut_dim(1, 0, 2);
  const Placement right = whole.cut_dim(1, 1, 2);
  const Placement upper = whole.cut_dim(0, 0, 2);
  const Placement as_three = Placement::full({3, 2, 4}).cut_dim(1, 1, 2);
  const std::vector<std::vector<Placement>> all = {
      {left, right},
      {left, left},
      {left, upper},
      {left.cut_flat(0, 2), left.cut_flat(1, 2), right.cut_flat(Interval{1, 12})},
      {upper, whole.cut_flat(1, 2)},
      {as_three, whole.cut_flat(0, 3)},
      {as_three, left},
      {as_three, Placement::full({3, 2, 4}).cut_dim(1, 0, 2)},
      {whole, left, as_three}};
  for (const std::vector<Placement>& placements : all) {
    std::set<std::int64_t> elements;
    std::string text;
    for (const Placement& one : placements) {
      text += one.text() + "; ";
      for (std::int64_t i = 0; i < one.elements(); ++i) elements.insert(one.logical_index(i));
    }
    EXPECT_EQ(covered_elements(held_in({6, 4}, placements)),
              static_cast<std::int64_t>(elements.size()))
        << text;
  }
}

TEST(Coverage, ThousandsOfPiecesTakeNoTime) {
  constexpr std::int64_t kRows = 1 << 20;
  const Placement whole = Placement::full({kRows, kRows});
  std::vector<Placement> placements;
  for (int column = 0; column < 64; ++column)
    for (int part = 0; part < 128; ++part)
      placements.push_back(whole.cut_dim(1, column, 64).cut_flat(part, 128));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(covered_elements(held_in({kRows, kRows}, placements)), kRows * kRows);
  placements.pop_back();
  placements.push_back(placements.front());
  EXPECT_EQ(covered_elements(held_in({kRows, kRows}, placements)),
            kRows * kRows - kRows * kRows / (64 * 128));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  // No program cuts a tensor this way.
  const auto odd =
      held_in({kRows, kRows}, {whole.cut_dim(1, 0, 2), whole.cut_dim(1, Interval{1, 9}),
                               whole.cut_dim(1, Interval{2, 9}), whole.cut_dim(1, Interval{3, 9}),
                               whole.cut_dim(1, Interval{4, 9})});
  Manifest manifest;
  manifest.tensors["model/odd"] = odd;
  EXPECT_THROW(check_complete(manifest, "'m.json'"), DamagedCheckpoint);
  EXPECT_THAT(usage_error([&] { check_complete(manifest, "'m.json'"); }),
              HasSubstr("'m.json': 'model/odd': its pieces overlap"));
}

}  // namespace
}  // namespace lockstep::checkpoint
