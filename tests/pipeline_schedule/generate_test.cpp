// Every schedule that can be generated: it runs, and holds as many micro-batches as its formula
// says.
#include <algorithm>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

#include "sizes.h"
#include "tests/base/errors.h"

namespace lockstep::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string size_text(ScheduleKind kind, const ScheduleSize& size) {
  return fmt::format("{} p {} m {} v {}", name_of(kind), size.num_ranks, size.num_micro_batches,
                     size.num_chunks);
}

TEST(Generate, EverySizeIsCompleteAndFreeOfDeadlock) {
  testing::for_each_size([](ScheduleKind kind, const ScheduleSize& size) {
    const Schedule schedule = make_schedule(kind, size);
    ASSERT_EQ(schedule.num_ranks(), size.num_ranks);
    ASSERT_EQ(schedule.num_micro_batches, size.num_micro_batches);
    ASSERT_NO_THROW(check(schedule)) << size_text(kind, size);
  });
}

// The formulas: GPipe m; 1F1B min(m, p - rank); interleaved, in chunks, (v - 1) p +
// 2 (p - 1 - rank) + 1 where p divides m; ZB-H1 p; ZB-V 2 p chunks.
TEST(Generate, EverySizeHoldsWhatItsFormulaSays) {
  testing::for_each_size([](ScheduleKind kind, const ScheduleSize& size) {
    const auto live = live_forwards(make_schedule(kind, size));
    const int p = size.num_ranks;
    const int m = size.num_micro_batches;
    const int v = size.num_chunks;
    for (int rank = 0; rank < p; ++rank) {
      const auto [until_input, until_weight] = live[static_cast<std::size_t>(rank)];
      const auto what = size_text(kind, size) + " rank " + std::to_string(rank);
      if (kind != ScheduleKind::zb_h1 && kind != ScheduleKind::zb_v) {
        ASSERT_EQ(until_input, until_weight) << what;
      }
      switch (kind) {
        case ScheduleKind::gpipe: ASSERT_EQ(until_weight, m) << what; break;
        case ScheduleKind::one_forward_one_backward:
          ASSERT_EQ(until_weight, std::min(m, p - rank)) << what;
          break;
        case ScheduleKind::interleaved: {
          // If p does not divide m, rounds are larger than p by their part of the remainder.
          const int rounds = std::max(1, m / p);
          const int round = (m + rounds - 1) / rounds;
          const int chunks = v == 1 ? std::min(m, p - rank)
                                    : std::min(v * m, (v - 1) * round + 2 * (p - 1 - rank) + 1);
          ASSERT_EQ(until_weight, chunks) << what;
          if (v > 1 && rank == 0 && m % p == 0 && m > p) {
            ASSERT_EQ(until_weight, p * v + p - 1) << what;
          }
          break;
        }
        case ScheduleKind::zb_h1:
          ASSERT_EQ(until_input, std::min(m, p - rank)) << what;
          ASSERT_EQ(until_weight, std::min(m, p)) << what;
          break;
        case ScheduleKind::zb_v:
          ASSERT_LE(until_weight, 2 * p) << what;
          if (m >= 2 * p) {
            ASSERT_EQ(until_weight, 2 * p) << what;
          }
          break;
      }
    }
  });
}

// A receive's memory is allocated when it starts.
TEST(Generate, FewReceivesAreStartedAndNotYetUsed) {
  testing::for_each_size([](ScheduleKind kind, const ScheduleSize& size) {
    if (size.num_micro_batches % 4 == 3) return;
    const Schedule schedule = make_schedule(kind, size);
    for (const auto& actions : schedule.actions) {
      int started = 0;
      int most = 0;
      for (const Action& action : actions) {
        if (is_receive(action.kind)) most = std::max(most, ++started);
        const int stage = action.stage;
        const int needed_from = action.kind == ActionKind::forward ? stage - 1 : stage + 1;
        if (!is_transfer(action.kind) && action.kind != ActionKind::backward_weight &&
            is_sent(schedule, needed_from, stage))
          --started;
      }
      // The receives of the next action that computes, and of the one after it; one more waits if a
      // channel carries both activations and gradients.
      const bool both = size.num_ranks == 2 || kind == ScheduleKind::zb_v;
      ASSERT_LE(most, both ? 3 : 2) << size_text(kind, size);
      ASSERT_EQ(started, 0);
    }
  });
}

TEST(Generate, OneForwardOneBackwardInFull) {
  const Schedule schedule = make_schedule(ScheduleKind::one_forward_one_backward,
                                          {.num_ranks = 2, .num_micro_batches = 2});
  EXPECT_EQ(schedule.name, "1f1b");
  EXPECT_THAT(schedule.rank_of_stage, ElementsAre(0, 1));
  const auto texts = [&](std::size_t rank) {
    std::string all;
    for (const Action& action : schedule.actions[rank]) all += to_text(action) + " ";
    return all;
  };
  EXPECT_EQ(texts(0), "F0.0 SA0.0 RG0.0 F0.1 SA0.1 RG0.1 B0.0 B0.1 ");
  EXPECT_EQ(texts(1), "RA1.0 F1.0 RA1.1 B1.0 SG1.0 F1.1 B1.1 SG1.1 ");
}

TEST(Generate, StagesLieInTurnOrInAV) {
  EXPECT_THAT(make_schedule(ScheduleKind::interleaved,
                            {.num_ranks = 3, .num_micro_batches = 1, .num_chunks = 2})
                  .rank_of_stage,
              ElementsAre(0, 1, 2, 0, 1, 2));
  EXPECT_THAT(
      make_schedule(ScheduleKind::zb_v, {.num_ranks = 3, .num_micro_batches = 1}).rank_of_stage,
      ElementsAre(0, 1, 2, 2, 1, 0));
}

TEST(Generate, OneRankSendsNothing) {
  for (const ScheduleKind kind : testing::own_kinds) {
    const Schedule schedule = make_schedule(kind, {.num_ranks = 1, .num_micro_batches = 3});
    for (const Action& action : schedule.actions.front())
      EXPECT_FALSE(is_transfer(action.kind)) << name_of(kind);
  }
}

TEST(Generate, NamesMistakes) {
  const auto refusal = [](ScheduleKind kind, const ScheduleSize& size) {
    return usage_error([&] { make_schedule(kind, size); });
  };
  EXPECT_THAT(refusal(ScheduleKind::gpipe, {.num_ranks = 0}), HasSubstr("0 ranks"));
  EXPECT_THAT(refusal(ScheduleKind::zb_v, {.num_ranks = 2, .num_micro_batches = 0}),
              HasSubstr("0 micro-batches"));
  EXPECT_THAT(refusal(ScheduleKind::interleaved, {.num_chunks = -1}),
              HasSubstr("-1 chunks a rank"));
  EXPECT_THAT(refusal(ScheduleKind::zb_h1, {.num_chunks = 2}),
              AllOf(HasSubstr("zb-h1 has 1 chunk"), HasSubstr("interleaved")));
  EXPECT_THAT(refusal(ScheduleKind::gpipe, {.num_ranks = 1 << 30, .num_micro_batches = 1 << 30}),
              HasSubstr("choose fewer"));
  EXPECT_THAT(usage_error([] { schedule_kind_named("1fib"); }),
              AllOf(HasSubstr("did you mean '1f1b'"), HasSubstr("zb-v")));
  for (const ScheduleKind kind : testing::own_kinds)
    EXPECT_EQ(schedule_kind_named(name_of(kind)), kind);
}

}  // namespace
}  // namespace lockstep::pipeline
