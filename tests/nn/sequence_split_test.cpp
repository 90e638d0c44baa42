#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include <ATen/ATen.h>

#include <lockstep/nn/context_parallel/sequence_split.h>

#include "../base/errors.h"

namespace lockstep::nn {
namespace {

using mesh::Interval;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr SplitKind kKinds[] = {SplitKind::contiguous, SplitKind::zigzag};

TEST(SequenceSplit, GivesEachRankItsChunks) {
  EXPECT_THAT(positions(12, {.rank = 1, .size = 3, .kind = SplitKind::contiguous}),
              ElementsAre(Interval{4, 8}));
  EXPECT_THAT(positions(12, {.rank = 0, .size = 3, .kind = SplitKind::zigzag}),
              ElementsAre(Interval{0, 2}, Interval{10, 12}));
  EXPECT_THAT(positions(12, {.rank = 1, .size = 3, .kind = SplitKind::zigzag}),
              ElementsAre(Interval{2, 4}, Interval{8, 10}));
  // Adjacent chunks are one interval.
  EXPECT_THAT(positions(12, {.rank = 2, .size = 3, .kind = SplitKind::zigzag}),
              ElementsAre(Interval{4, 8}));
  // With one rank, any length works.
  EXPECT_THAT(positions(7, {.rank = 0, .size = 1, .kind = SplitKind::zigzag}),
              ElementsAre(Interval{0, 7}));
}

// Counts the pairs of a query and a key that it sees, one by one.
TEST(SequenceSplit, SharesCausalWorkEvenlyInZigzag) {
  for (const int size : {2, 3, 4, 8}) {
    std::set<std::int64_t> work;
    for (int rank = 0; rank < size; ++rank) {
      std::int64_t pairs = 0;
      for (const auto& [begin, end] :
           positions(48, {.rank = rank, .size = size, .kind = SplitKind::zigzag}))
        for (auto position = begin; position < end; ++position) pairs += position + 1;
      work.insert(pairs);
    }
    EXPECT_EQ(work.size(), 1u) << size;
  }
}

TEST(SequenceSplit, PartsJoinToTheWhole) {
  const auto whole = at::randn({3, 48, 2});
  for (const auto kind : kKinds)
    for (const int size : {1, 2, 3, 4, 6}) {
      std::vector<at::Tensor> parts;
      for (int rank = 0; rank < size; ++rank) {
        parts.push_back(take_part(whole, 1, {.rank = rank, .size = size, .kind = kind}));
        EXPECT_EQ(parts.back().size(1), local_length(48, size, kind));
        EXPECT_TRUE(take_part(whole.transpose(1, 2), -1, {.rank = rank, .size = size, .kind = kind})
                        .equal(parts.back().transpose(1, 2)));
      }
      EXPECT_TRUE(join_parts(parts, 1, kind).equal(whole)) << name(kind) << ' ' << size;
    }
}

// Compares the sight of a rank's queries with a comparison of positions.
TEST(SequenceSplit, KnowsWhatSeesWhat) {
  const auto at_positions = [](const SequencePart& part) {
    return take_part(at::arange(24, at::kLong), 0, part);
  };
  for (const auto kind : kKinds)
    for (const bool causal : {true, false})
      for (const int size : {2, 3, 4})
        for (int rank = 0; rank < size; ++rank)
          for (int owner = 0; owner < size; ++owner) {
            const SequencePart mine{.rank = rank, .size = size, .kind = kind};
            const auto sight = internal::sight_of(mine, owner, 24 / size, causal);
            auto seen = at::zeros({24 / size, 24 / size}, at::kBool);
            auto rectangle = at::ones({sight.queries.size(), sight.keys.size()}, at::kBool);
            if (sight.causal) rectangle = rectangle.tril();
            if (!sight.empty())
              seen.slice(0, sight.queries.begin, sight.queries.end)
                  .slice(1, sight.keys.begin, sight.keys.end)
                  .copy_(rectangle);
            const auto queries = at_positions(mine).unsqueeze(1);
            const auto keys =
                at_positions({.rank = owner, .size = size, .kind = kind}).unsqueeze(0);
            const auto wanted = causal ? keys.le(queries) : keys.eq(keys).expand_as(seen);
            EXPECT_TRUE(seen.equal(wanted))
                << name(kind) << ' ' << causal << ' ' << size << ' ' << rank << ' ' << owner;
          }
}

TEST(SequenceSplit, RefusesLengthsThatDoNotDivide) {
  EXPECT_THAT(usage_error([] { local_length(1002, 4, SplitKind::zigzag); }),
              testing::AllOf(HasSubstr("1002"), HasSubstr("4 ranks"), HasSubstr("multiple of 8"),
                             HasSubstr("1008"), HasSubstr("1000")));
  EXPECT_THAT(usage_error([] { take_part(at::ones({5}), 0, {.rank = 0, .size = 3}); }),
              testing::AllOf(HasSubstr("Pad it to 6"), testing::Not(HasSubstr("cut it"))));
  EXPECT_THAT(usage_error([] {
                take_part(at::ones({7}), 0, {.rank = 0, .size = 3, .kind = SplitKind::contiguous});
              }),
              testing::AllOf(HasSubstr("multiple of 3"), HasSubstr("9"), HasSubstr("6")));
  EXPECT_THAT(usage_error([] { positions(6, {.rank = 3, .size = 3}); }), HasSubstr("rank 3 of 3"));
  EXPECT_THAT(usage_error([] {
                join_parts({at::ones({4}), at::ones({6})}, 0, SplitKind::contiguous);
              }),
              testing::AllOf(HasSubstr("rank 1"), HasSubstr("6")));
  EXPECT_THAT(usage_error([] {
                join_parts({at::ones({3}), at::ones({3})}, 0, SplitKind::zigzag);
              }),
              HasSubstr("3 positions"));
}

}  // namespace
}  // namespace lockstep::nn
