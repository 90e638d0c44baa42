// Schedules that the check must refuse.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>

#include "sizes.h"
#include "tests/base/errors.h"

namespace lockstep::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

Action action_named(std::string_view text) { return parse_action(text).value(); }

class CheckSchedule : public ::testing::Test {
 protected:
  static Schedule make(ScheduleKind kind, int ranks = 2, int micro_batches = 2) {
    return make_schedule(kind, {.num_ranks = ranks, .num_micro_batches = micro_batches});
  }
  static std::vector<Action>::iterator find(Schedule& schedule, std::size_t rank,
                                            std::string_view text) {
    auto& actions = schedule.actions[rank];
    const auto found = std::ranges::find(actions, action_named(text));
    EXPECT_NE(found, actions.end()) << text;
    return found;
  }
  static void remove(Schedule& schedule, std::size_t rank, std::string_view text) {
    schedule.actions[rank].erase(find(schedule, rank, text));
  }
  static void swap(Schedule& schedule, std::size_t rank, std::string_view one,
                   std::string_view other) {
    std::iter_swap(find(schedule, rank, one), find(schedule, rank, other));
  }
  static std::string refusal(const Schedule& schedule) {
    return usage_error([&] { check(schedule); });
  }
};

TEST_F(CheckSchedule, StagesAndRanks) {
  Schedule schedule = make(ScheduleKind::gpipe);
  schedule.rank_of_stage[1] = 2;
  EXPECT_THAT(refusal(schedule), HasSubstr("stage 1 is on rank 2, and there are 2 ranks"));
  schedule.rank_of_stage[1] = -1;
  EXPECT_THAT(refusal(schedule), HasSubstr("stage 1 is on rank -1"));
  schedule.rank_of_stage[1] = 0;
  EXPECT_THAT(refusal(schedule), HasSubstr("rank 1 has no stage"));
  schedule = make(ScheduleKind::gpipe);
  schedule.num_micro_batches = 1 << 30;
  EXPECT_THAT(refusal(schedule), HasSubstr("the schedule has 16 actions"));
  EXPECT_THAT(refusal({.name = "none", .num_micro_batches = 1}), HasSubstr("no ranks"));
}

TEST_F(CheckSchedule, WhatIsMissing) {
  for (const auto& [rank, text, part] :
       {std::tuple(0u, "F0.1", "rank 0 has no F0.1"),
        std::tuple(1u, "B1.0", "rank 1 has no B1.0, nor I1.0 and W1.0"),
        std::tuple(0u, "SA0.1", "rank 0 has no SA0.1, which rank 1, action 1 (RA1.1) needs"),
        std::tuple(1u, "RA1.1", "rank 1 has no RA1.1, which rank 1, action 2 (F1.1) needs"),
        std::tuple(1u, "SG1.0", "rank 1 has no SG1.0, which rank 0, action"),
        std::tuple(0u, "RG0.1", "rank 0 has no RG0.1, which rank 0, action")}) {
    Schedule schedule = make(ScheduleKind::gpipe);
    remove(schedule, rank, text);
    // An action too many elsewhere must not make up for a missing one.
    EXPECT_THAT(refusal(schedule), HasSubstr(part)) << text;
  }
  Schedule split = make(ScheduleKind::zb_h1);
  remove(split, 1, "W1.1");
  EXPECT_THAT(refusal(split), HasSubstr("rank 1 has no W1.1, which rank 1, action"));
  split = make(ScheduleKind::zb_h1);
  remove(split, 1, "I1.1");
  EXPECT_THAT(refusal(split), HasSubstr("rank 1 has no I1.1, which rank 1, action"));
}

TEST_F(CheckSchedule, WhatIsTooMuch) {
  Schedule schedule = make(ScheduleKind::gpipe);
  schedule.actions[0].push_back(action_named("F0.0"));
  EXPECT_THAT(refusal(schedule), HasSubstr("rank 0, action 8 (F0.0): it stands there a second "
                                           "time, after action 0"));
  schedule.actions[0].back() = action_named("W0.0");
  EXPECT_THAT(refusal(schedule), HasSubstr("rank 0, action 8 (W0.0): it is a part of B0.0"));
  schedule.actions[0].back() = action_named("F2.0");
  EXPECT_THAT(refusal(schedule), HasSubstr("rank 0, action 8 (F2.0): there is no stage 2"));
  schedule.actions[0].back() = action_named("F0.2");
  EXPECT_THAT(refusal(schedule), HasSubstr("there is no micro-batch 2"));
  schedule.actions[0].back() = {ActionKind::forward, -1, 0};
  EXPECT_THAT(refusal(schedule), HasSubstr("there is no stage -1"));
  schedule.actions[0].back() = action_named("F1.0");
  EXPECT_THAT(refusal(schedule), HasSubstr("stage 1 is on rank 1"));
  schedule.actions[0].back() = action_named("SG0.0");
  EXPECT_THAT(refusal(schedule), HasSubstr("there is no stage at its other end"));
  Schedule turn = make(ScheduleKind::zb_v);
  turn.actions[1].push_back(action_named("SA1.0"));
  EXPECT_THAT(refusal(turn), HasSubstr("stage 2 is on this rank, too, and needs no transfer"));
}

TEST_F(CheckSchedule, OrderOnARank) {
  for (const auto& [kind, rank, one, other] :
       {std::tuple(ScheduleKind::gpipe, 1u, "F1.1", "B1.1"),
        std::tuple(ScheduleKind::zb_h1, 0u, "I0.1", "W0.1"),
        std::tuple(ScheduleKind::gpipe, 0u, "F0.1", "SA0.1"),
        std::tuple(ScheduleKind::gpipe, 1u, "RA1.1", "F1.1"),
        std::tuple(ScheduleKind::gpipe, 1u, "B1.1", "SG1.1"),
        std::tuple(ScheduleKind::gpipe, 0u, "RG0.1", "B0.1")}) {
    Schedule schedule = make(kind);
    swap(schedule, rank, one, other);
    EXPECT_THAT(refusal(schedule),
                AllOf(HasSubstr(fmt::format("rank {}, action ", rank)),
                      HasSubstr(fmt::format("({}): it stands before {}, action", other, one))));
  }
}

TEST_F(CheckSchedule, OrderOfAChannel) {
  Schedule schedule = make(ScheduleKind::gpipe);
  swap(schedule, 0, "SA0.0", "SA0.1");
  // Each action still comes after its forward.
  std::iter_swap(find(schedule, 0, "SA0.1"), find(schedule, 0, "F0.1"));
  EXPECT_THAT(refusal(schedule),
              AllOf(HasSubstr("rank 1, action 1 (RA1.1): it stands behind RA1.0, but rank 0 sends "
                              "SA0.1"),
                    HasSubstr("arrives in order")));
}

// The last rank wants the second micro-batch forward before the first is back, and the first rank
// sends it only after that: both wait.
TEST_F(CheckSchedule, ADeadlockIsToldAsWhoWaitsForWhom) {
  Schedule schedule = make(ScheduleKind::gpipe);
  schedule.actions[0].clear();
  for (const char* text : {"F0.0", "SA0.0", "RG0.0", "RG0.1", "B0.0", "F0.1", "SA0.1", "B0.1"})
    schedule.actions[0].push_back(action_named(text));
  EXPECT_THAT(refusal(schedule),
              AllOf(HasSubstr("deadlock: rank 0, action 4 (B0.0) waits for SG1.0, action"),
                    HasSubstr("rank 1, action 3 (F1.1) waits for SA0.1, action 6 of rank 0")));
}

TEST_F(CheckSchedule, ARankThatWaitsForItself) {
  Schedule schedule = make(ScheduleKind::zb_v, 1, 1);
  swap(schedule, 0, "F0.0", "F1.0");
  EXPECT_THAT(refusal(schedule), HasSubstr("rank 0, action 0 (F1.0) waits for F0.0, action 1 of"));
}

// Whichever action is left out, the check notices.
TEST_F(CheckSchedule, NoActionCanBeLeftOut) {
  for (const ScheduleKind kind : testing::own_kinds) {
    const Schedule whole = make(kind, 3, 4);
    for (std::size_t rank = 0; rank < whole.actions.size(); ++rank)
      for (std::size_t i = 0; i < whole.actions[rank].size(); ++i) {
        Schedule schedule = whole;
        schedule.actions[rank].erase(schedule.actions[rank].begin() + static_cast<long>(i));
        EXPECT_THROW(check(schedule), UsageError) << to_text(whole.actions[rank][i]);
      }
  }
}

}  // namespace
}  // namespace lockstep::pipeline
