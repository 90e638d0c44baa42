#include <lockstep/mesh/placement/read_plan.h>

#include <algorithm>
#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

#include "random_placement.h"

namespace lockstep::mesh {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using testing::enumerate;
using ::testing::HasSubstr;
using testing::Random;

TEST(ReadPlan, ReshardFromTwoToThree) {
  const auto full = Placement::full({12});
  const std::vector<Placement> holders = {full.cut_flat(0, 2), full.cut_flat(1, 2)};
  const auto plan = plan_reads(full.cut_flat(1, 3), holders);
  EXPECT_THAT(plan.reads, ElementsAre(Read{0, 4, 0, 2}, Read{1, 0, 2, 2}));
  EXPECT_THAT(plan.elements_from, ElementsAre(2, 2));
  EXPECT_TRUE(plan.complete());
  EXPECT_NO_THROW(plan.check_complete("w", full.cut_flat(1, 3)));
}

TEST(ReadPlan, SaysWhatNobodyHolds) {
  const auto full = Placement::full({4, 5});
  const std::vector<Placement> holders = {full.cut_dim(0, 0, 4), full.cut_dim(0, 3, 4)};
  const auto plan = plan_reads(full, holders);
  EXPECT_THAT(plan.missing, ElementsAre(Stretch{5, 10}));
  try {
    plan.check_complete("layers.3.weight", full);
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'layers.3.weight' of shape [4, 5]"));
    EXPECT_THAT(error.what(), HasSubstr("nobody holds 10 of the 20 elements"));
    EXPECT_THAT(error.what(), HasSubstr("the first of them at [1, 0]"));
  }
  EXPECT_FALSE(plan_reads(full, {}).complete());
}

TEST(ReadPlan, ReplicasShareALargeRead) {
  const auto full = Placement::full({1000, 1000});
  const std::vector<Placement> holders(4, full);
  const auto plan = plan_reads(full, holders);
  EXPECT_EQ(plan.reads.size(), 4u);
  EXPECT_THAT(plan.elements_from, Each(250000));
}

TEST(ReadPlan, SmallReadsStayWholeAndReadersTakeTurns) {
  const auto full = Placement::full({100});
  const std::vector<Placement> holders(4, full);
  for (int reader = 0; reader < 8; ++reader) {
    const auto plan = plan_reads(full, holders, {.reader = reader});
    EXPECT_THAT(plan.reads, ElementsAre(Read{reader % 4, 0, 0, 100}));
  }
}

TEST(ReadPlan, LocalIsPreferred) {
  const auto full = Placement::full({1 << 20});
  const std::vector<Placement> holders = {full, full, full.cut_flat(0, 2)};
  const auto plan = plan_reads(full, holders, {.local = 2});
  EXPECT_EQ(plan.elements_from[2], 1 << 19);
  EXPECT_EQ(plan.elements_from[0] + plan.elements_from[1], 1 << 19);
}

// The work grows with runs, not elements, and replicas do not multiply it: a thousand ranks reshard
// a large matrix.
TEST(ReadPlan, ManyHolders) {
  const auto full = Placement::full({65536, 8192});
  std::vector<Placement> holders;
  for (int rank = 0; rank < 1024; ++rank)
    holders.push_back(full.cut_dim(0, rank % 8, 8).cut_flat(rank / 8 % 32, 32));
  const auto mine = full.cut_dim(0, 1, 3).cut_flat(1, 5);
  const auto plan = plan_reads(mine, holders, {.reader = 5});
  EXPECT_TRUE(plan.complete());
  EXPECT_EQ(std::accumulate(plan.elements_from.begin(), plan.elements_from.end(), std::int64_t{0}),
            mine.elements());
  EXPECT_LT(plan.reads.size(), 400u);
}

TEST(ReadPlan, CoversEachElementOnceFromSomeoneWhoHasIt) {
  Random random(4);
  for (int round = 0; round < 3000; ++round) {
    const auto shape = random.shape();
    const auto mine = random.placement(shape);
    std::vector<Placement> holders;
    std::vector<std::vector<std::int64_t>> held;
    for (int count = random.number(0, 5); count > 0; --count) {
      const bool replica = !holders.empty() && random.number(0, 2) == 0;
      holders.push_back(replica ? holders.back() : random.placement(shape));
      held.push_back(enumerate(holders.back()));
    }
    ReadOptions options{.reader = random.number(0, 5), .smallest_piece = random.number(1, 40)};
    if (!holders.empty() && random.number(0, 3) == 0)
      options.local = random.number(0, static_cast<int>(holders.size()) - 1);
    const auto plan = plan_reads(mine, holders, options);

    const auto wanted = enumerate(mine);
    std::vector<std::int64_t> elements_from(holders.size(), 0);
    std::int64_t at = 0;
    std::vector<bool> read(wanted.size(), false);
    for (const Read& step : plan.reads) {
      ASSERT_GE(step.destination_offset, at);
      ASSERT_GT(step.count, 0);
      at = step.destination_offset + step.count;
      const auto holder = static_cast<std::size_t>(step.holder);
      elements_from.at(holder) += step.count;
      for (std::int64_t k = 0; k < step.count; ++k) {
        const auto destination = static_cast<std::size_t>(step.destination_offset + k);
        ASSERT_EQ(held[holder].at(static_cast<std::size_t>(step.source_offset + k)),
                  wanted.at(destination));
        read[destination] = true;
      }
    }
    ASSERT_EQ(elements_from, plan.elements_from);
    std::vector<bool> missing(wanted.size(), false);
    for (const Stretch& stretch : plan.missing)
      for (std::int64_t k = 0; k < stretch.count; ++k)
        missing.at(static_cast<std::size_t>(stretch.offset + k)) = true;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const bool exists = std::any_of(held.begin(), held.end(), [&](const auto& list) {
        return std::binary_search(list.begin(), list.end(), wanted[i]);
      });
      ASSERT_EQ(read[i], exists);
      ASSERT_EQ(missing[i], !exists);
      if (options.local && exists) {
        const auto& local = held[static_cast<std::size_t>(*options.local)];
        if (std::binary_search(local.begin(), local.end(), wanted[i])) {
          const auto step = std::find_if(plan.reads.begin(), plan.reads.end(), [&](const Read& r) {
            return r.destination_offset + r.count > static_cast<std::int64_t>(i);
          });
          ASSERT_EQ(step->holder, *options.local);
        }
      }
    }
    ASSERT_EQ(held_by_none(mine, holders), plan.missing);
    ASSERT_EQ(plan_reads(mine, holders, options).reads, plan.reads);
  }
}

// If replicas hold everything, they are read evenly, to within a piece.
TEST(ReadPlan, BalancesReplicas) {
  Random random(5);
  for (int round = 0; round < 500; ++round) {
    const auto shape = random.shape();
    const auto mine = random.placement(shape);
    const std::vector<Placement> holders(static_cast<std::size_t>(random.number(1, 5)),
                                         Placement::full(shape));
    const int piece = random.number(1, 20);
    const auto plan = plan_reads(mine, holders, {.smallest_piece = piece});
    const auto [least, most] =
        std::minmax_element(plan.elements_from.begin(), plan.elements_from.end());
    ASSERT_LE(*most - *least, 2 * piece) << mine.text();
  }
}

// The elements of each rank that no earlier rank holds: every element occurs once.
TEST(HeldByNone, EachElementHasOneOwner) {
  Random random(6);
  for (int round = 0; round < 1000; ++round) {
    const auto shape = random.shape();
    std::vector<Placement> ranks;
    for (int count = random.number(1, 5); count > 0; --count)
      ranks.push_back(random.placement(shape));
    std::vector<int> owners(static_cast<std::size_t>(ranks[0].logical_elements()), 0);
    std::vector<int> holders(owners.size(), 0);
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      for (const auto logical : enumerate(ranks[rank]))
        holders[static_cast<std::size_t>(logical)] = 1;
      for (const Stretch& stretch : held_by_none(ranks[rank], std::span(ranks).first(rank)))
        for (std::int64_t k = 0; k < stretch.count; ++k)
          ++owners[static_cast<std::size_t>(ranks[rank].logical_index(stretch.offset + k))];
    }
    ASSERT_EQ(owners, holders);
  }
}

}  // namespace
}  // namespace lockstep::mesh
