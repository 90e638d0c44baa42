#include <lockstep/mesh/placement/placement.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

#include "../base/errors.h"
#include "random_placement.h"

namespace lockstep::mesh {
namespace {

using ::testing::ElementsAre;
using testing::enumerate;
using ::testing::HasSubstr;
using testing::Random;

TEST(PartOf, PartsAreInOrderAndCoverAll) {
  for (std::int64_t size = 0; size < 40; ++size) {
    for (int parts = 1; parts < 12; ++parts) {
      for (const Uneven uneven : {Uneven::balanced, Uneven::chunked}) {
        std::int64_t at = 0;
        for (int index = 0; index < parts; ++index) {
          const Interval part = part_of(size, index, parts, uneven);
          ASSERT_EQ(part.begin, at);
          ASSERT_GE(part.size(), 0);
          const std::int64_t most = (size + parts - 1) / parts;
          ASSERT_LE(part.size(), most);
          if (uneven == Uneven::balanced) {
            ASSERT_GE(part.size(), size / parts);
          }
          if (uneven == Uneven::chunked && part.end < size) {
            ASSERT_EQ(part.size(), most);
          }
          at = part.end;
        }
        ASSERT_EQ(at, size);
      }
    }
  }
}

TEST(PartOf, HugeSizesDoNotOverflow) {
  const std::int64_t huge = INT64_MAX;
  for (const Uneven uneven : {Uneven::balanced, Uneven::chunked}) {
    EXPECT_EQ(part_of(huge, 0, 7, uneven).begin, 0);
    EXPECT_EQ(part_of(huge, 6, 7, uneven).end, huge);
    EXPECT_EQ(part_of(huge, 1000, 1001, uneven).end, huge);
    EXPECT_EQ(part_of(huge, 2, 7, uneven).end, part_of(huge, 3, 7, uneven).begin);
  }
}

TEST(PartOf, BadNumbers) {
  EXPECT_THAT(usage_error([] { part_of(4, 2, 2); }), HasSubstr("part 2 of 2"));
  EXPECT_THAT(usage_error([] { part_of(4, -1, 2); }), HasSubstr("part -1 of 2"));
  EXPECT_THAT(usage_error([] { part_of(4, 0, 0); }), HasSubstr("part 0 of 0"));
  EXPECT_THAT(usage_error([] { part_of(-4, 0, 1); }), HasSubstr("-4"));
}

TEST(Placement, Example) {
  // Columns 3 to 5 of an 8 x 6 matrix, and the second half of them in flat order.
  const auto columns = Placement::full({8, 6}).cut_dim(1, 1, 2);
  EXPECT_EQ(columns.text(), "[0:8, 3:6] of [8, 6]");
  const auto half = columns.cut_flat(1, 2);
  EXPECT_EQ(half.text(), "elements 12:24 of [0:8, 3:6] of [8, 6]");
  EXPECT_EQ(half.elements(), 12);
  EXPECT_THAT(half.coordinates(0), ElementsAre(4, 3));
  EXPECT_EQ(half.logical_index(0), 27);
  EXPECT_EQ(half.local_offset(27), 0);
  EXPECT_EQ(half.local_offset(26), std::nullopt);
  EXPECT_FALSE(half.contains(Placement::Shape{0, 3}));
  EXPECT_TRUE(half.contains(Placement::Shape{7, 5}));
}

TEST(Placement, ScalarsAndEmptyTensors) {
  const auto scalar = Placement::full({});
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_TRUE(scalar.contains(0));
  EXPECT_THAT(intersect(scalar, scalar), ElementsAre(SharedRun{0, 0, 1}));
  EXPECT_TRUE(scalar.cut_flat(1, 2).empty());
  const auto none = Placement::full({3, 0, 2});
  EXPECT_TRUE(none.empty());
  EXPECT_TRUE(intersect(none, none.cut_dim(0, 1, 3)).empty());
}

TEST(Placement, UnevenSizes) {
  const std::vector<std::int64_t> sizes = {5, 0, 2};
  const auto full = Placement::full({7, 2});
  EXPECT_EQ(full.cut_dim(0, 0, sizes).box()[0], (Interval{0, 5}));
  EXPECT_TRUE(full.cut_dim(0, 1, sizes).empty());
  EXPECT_EQ(full.cut_dim(0, 2, sizes).box()[0], (Interval{5, 7}));
  EXPECT_THAT(usage_error([&] { full.cut_dim(1, 0, sizes); }), HasSubstr("[5, 0, 2]"));
  EXPECT_THAT(usage_error([&] { full.cut_dim(0, 3, sizes); }), HasSubstr("part 3 of 3"));
  const std::vector<std::int64_t> negative = {8, -1};
  EXPECT_THAT(usage_error([&] { full.cut_dim(0, 0, negative); }), HasSubstr("[8, -1]"));
}

TEST(Placement, BadCuts) {
  const auto full = Placement::full({4, 6});
  EXPECT_THAT(usage_error([] { Placement::full({2, -3}); }), HasSubstr("[2, -3]"));
  EXPECT_THAT(usage_error([] {
                Placement::full({1LL << 40, 0, 1LL << 40});
              }),
              HasSubstr("63 bits"));
  EXPECT_THAT(usage_error([&] { full.cut_dim(2, 0, 2); }), HasSubstr("dim 2"));
  EXPECT_THAT(usage_error([&] { full.cut_dim(-3, 0, 2); }), HasSubstr("dim -3"));
  EXPECT_THAT(usage_error([&] { full.cut_dim(0, Interval{1, 5}); }), HasSubstr("[1, 5)"));
  EXPECT_THAT(usage_error([&] { full.cut_dim(0, Interval{3, 2}); }), HasSubstr("[3, 2)"));
  EXPECT_THAT(usage_error([&] { full.cut_flat(Interval{0, 25}); }), HasSubstr("[0, 24)"));
  EXPECT_THAT(usage_error([&] { full.cut_flat(0, 2).cut_dim(0, 0, 2); }),
              HasSubstr("cut dims first"));
  EXPECT_THAT(usage_error([&] { full.local_offset(24); }), HasSubstr("element 24"));
  EXPECT_THAT(usage_error([&] { full.logical_index(-1); }), HasSubstr("element -1"));
  EXPECT_THAT(usage_error([&] {
                intersect(full, Placement::full({6, 4}));
              }),
              HasSubstr("[4, 6] and [6, 4]"));
}

TEST(Placement, MapsAgreeWithEnumeration) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const auto placement = random.placement(random.shape());
    const auto held = enumerate(placement);
    ASSERT_EQ(placement.elements(), static_cast<std::int64_t>(held.size())) << placement.text();
    std::vector<std::int64_t> offset(static_cast<std::size_t>(placement.logical_elements()), -1);
    for (std::size_t local = 0; local < held.size(); ++local) {
      ASSERT_EQ(placement.logical_index(static_cast<std::int64_t>(local)), held[local]);
      ASSERT_EQ(placement.local_offset(placement.coordinates(static_cast<std::int64_t>(local))),
                static_cast<std::int64_t>(local));
      offset[static_cast<std::size_t>(held[local])] = static_cast<std::int64_t>(local);
    }
    for (std::size_t logical = 0; logical < offset.size(); ++logical)
      ASSERT_EQ(placement.local_offset(static_cast<std::int64_t>(logical)).value_or(-1),
                offset[logical])
          << placement.text();
  }
}

// Every cut is a partition: each element that was held is in exactly one part.
TEST(Placement, CutsPartition) {
  Random random(2);
  for (int round = 0; round < 1000; ++round) {
    const auto whole = random.placement(random.shape());
    const auto uneven = random.number(0, 1) == 0 ? Uneven::balanced : Uneven::chunked;
    const int parts = random.number(1, 5);
    const int num_dims = static_cast<int>(whole.shape().size());
    const bool flat = !whole.whole_box() || num_dims == 0 || random.number(0, 1) == 0;
    const int dim = flat ? 0 : random.number(0, num_dims - 1);
    std::vector<std::int64_t> together;
    for (int index = 0; index < parts; ++index) {
      const auto part =
          flat ? whole.cut_flat(index, parts, uneven) : whole.cut_dim(dim, index, parts, uneven);
      const auto held = enumerate(part);
      together.insert(together.end(), held.begin(), held.end());
    }
    std::sort(together.begin(), together.end());
    ASSERT_EQ(together, enumerate(whole)) << whole.text();
  }
}

TEST(Intersect, AgreesWithEnumeration) {
  Random random(3);
  for (int round = 0; round < 20000; ++round) {
    const auto shape = random.shape();
    const auto a = random.placement(shape);
    const auto b = random.placement(shape);
    const auto held_a = enumerate(a);
    const auto held_b = enumerate(b);
    std::vector<std::int64_t> expected;
    std::set_intersection(held_a.begin(), held_a.end(), held_b.begin(), held_b.end(),
                          std::back_inserter(expected));
    std::vector<std::int64_t> found;
    const auto runs = intersect(a, b);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const SharedRun& run = runs[i];
      ASSERT_GT(run.count, 0);
      for (std::int64_t k = 0; k < run.count; ++k) {
        const auto logical = held_a.at(static_cast<std::size_t>(run.a_offset + k));
        ASSERT_EQ(logical, held_b.at(static_cast<std::size_t>(run.b_offset + k)));
        found.push_back(logical);
      }
      // There are as few runs as possible: no run continues the one before it in both placements.
      if (i + 1 < runs.size()) {
        ASSERT_FALSE(runs[i + 1].a_offset == run.a_offset + run.count &&
                     runs[i + 1].b_offset == run.b_offset + run.count)
            << a.text() << " with " << b.text();
      }
    }
    ASSERT_EQ(found, expected) << a.text() << " with " << b.text();
    ASSERT_EQ(common_elements(a, b), static_cast<std::int64_t>(expected.size()));
  }
}

// The work grows with runs, not elements: half a trillion elements take no longer than their few
// runs.
TEST(Intersect, HugeTensors) {
  const auto full = Placement::full({1 << 20, 1 << 20});
  const auto rows = full.cut_dim(0, 1, 2);
  const auto shard = full.cut_flat(5, 8);
  const std::int64_t eighth = std::int64_t{1} << 37;
  EXPECT_THAT(intersect(rows, shard), ElementsAre(SharedRun{eighth, 0, eighth}));
  EXPECT_THAT(intersect(rows.cut_dim(1, 0, 2), rows.cut_dim(1, 0, 2)),
              ElementsAre(SharedRun{0, 0, std::int64_t{1} << 38}));
  EXPECT_EQ(common_elements(full.cut_dim(1, 1, 2), full.cut_dim(0, 1, 2)), std::int64_t{1} << 38);
}

}  // namespace
}  // namespace lockstep::mesh
