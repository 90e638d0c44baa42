// Compares bubbles with the formulas, and with published measurements.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include "sizes.h"
#include "tests/base/errors.h"

namespace lockstep::pipeline {
namespace {

using ::testing::HasSubstr;

// Powers of two and small numbers, whose sums are exact.
constexpr StageTimes kEqual = {};
constexpr StageTimes kUneven = {.forward = 2, .backward_input = 2.5, .backward_weight = 1.5};

// Times are those of a rank's whole share of the model, which its chunks divide.
Timeline run(ScheduleKind kind, const ScheduleSize& size, const StageTimes& times,
             double transfer = 0) {
  const Schedule schedule = make_schedule(kind, size);
  const double chunks = schedule.num_stages() / size.num_ranks;
  return simulate(schedule, {.stages = {{.forward = times.forward / chunks,
                                         .backward_input = times.backward_input / chunks,
                                         .backward_weight = times.backward_weight / chunks}},
                             .transfer = transfer});
}

// The makespan beyond the time that a rank computes.
double bubble_time(const Timeline& timeline, int micro_batches, const StageTimes& times) {
  return timeline.makespan() -
         micro_batches * (times.forward + times.backward_input + times.backward_weight);
}

TEST(Simulate, BubblesAreThoseOfTheFormulas) {
  for (const StageTimes& times : {kEqual, kUneven})
    testing::for_each_size([&](ScheduleKind kind, const ScheduleSize& size) {
      const int p = size.num_ranks;
      const int m = size.num_micro_batches;
      const int v = std::max(1, size.num_chunks);
      if (kind == ScheduleKind::zb_v || m % 3 == 2) return;
      const double f = times.forward;
      const double b = times.backward_input;
      const double w = times.backward_weight;
      double expected = (p - 1) * (f + b + w);
      // With too few micro-batches to fill the pipeline, more time is lost.
      if (kind == ScheduleKind::interleaved) {
        if (m < p) return;
        expected /= v;
      }
      if (kind == ScheduleKind::zb_h1) {
        if (m < p) return;
        expected = (p - 1) * (f + b - w);
      }
      const Timeline timeline = run(kind, size, times);
      const double tolerance = 1e-9 * timeline.makespan();
      ASSERT_NEAR(bubble_time(timeline, m, times), expected, tolerance)
          << name_of(kind) << " p " << p << " m " << m << " v " << v;
      const double whole = m * (f + b + w) + expected;
      ASSERT_NEAR(bubble(timeline), expected / whole, 1e-9);
    });
}

// A rank is idle only while the last rank waits for its first micro-batch; between a rank's own
// first action and its last it is never idle.
TEST(Simulate, ZeroBubbleOfTheV) {
  for (const int p : testing::kRanks)
    for (const int m : {2 * p - 1, 2 * p, 4 * p}) {
      const Timeline timeline =
          run(ScheduleKind::zb_v, {.num_ranks = p, .num_micro_batches = m}, kEqual);
      EXPECT_DOUBLE_EQ(bubble_time(timeline, m, kEqual), (p - 1) * 0.5) << p << " " << m;
      EXPECT_NEAR(bubble_between_own_ends(timeline), 0, 1e-12) << p << " " << m;
    }
}

TEST(Simulate, ZeroBubbleOfTheVBearsUnevenTimesAndTransfers) {
  const StageTimes nearly = {.forward = 1, .backward_input = 1.1, .backward_weight = 0.9};
  for (const int p : {4, 8}) {
    const ScheduleSize size = {.num_ranks = p, .num_micro_batches = 4 * p};
    EXPECT_LT(bubble_between_own_ends(run(ScheduleKind::zb_v, size, nearly)), 0.03);
    EXPECT_LT(bubble_between_own_ends(run(ScheduleKind::zb_v, size, kEqual, 0.03)), 0.03);
    EXPECT_LT(bubble(run(ScheduleKind::zb_v, size, nearly)),
              0.5 * bubble(run(ScheduleKind::zb_h1, size, nearly)));
  }
}

TEST(Simulate, FewMicroBatchesAreNoWorseThanOneForwardOneBackward) {
  for (const int p : {2, 4, 8})
    for (int m = 1; m < 2 * p; ++m)
      for (const ScheduleKind kind : testing::own_kinds) {
        const ScheduleSize size = {.num_ranks = p, .num_micro_batches = m};
        EXPECT_LE(bubble(run(kind, size, kEqual)),
                  bubble(run(ScheduleKind::one_forward_one_backward, size, kEqual)) + 1e-12)
            << name_of(kind) << " p " << p << " m " << m;
      }
}

// A table of the zero-bubble paper: milliseconds for stages of models with 1.5 and 6.2 billion
// parameters on 8 ranks with 24 micro-batches, and the bubble rates of the paper's own simulator.
TEST(Simulate, AgreesWithProfiledModels) {
  struct Profile {
    StageTimes times;
    double transfer;
    double one_forward_one_backward;
    double zb_h1;
  };
  const ScheduleSize size = {.num_ranks = 8, .num_micro_batches = 24};
  for (const auto& [times, transfer, rate, h1_rate] :
       {Profile{{18.522, 18.086, 9.337}, 0.601, 0.2431, 0.1585},
        Profile{{29.718, 29.444, 19.927}, 0.527, 0.2347, 0.1323}}) {
    EXPECT_NEAR(
        bubble_between_own_ends(run(ScheduleKind::one_forward_one_backward, size, times, transfer)),
        rate, 0.0001);
    EXPECT_NEAR(bubble_between_own_ends(run(ScheduleKind::zb_h1, size, times, transfer)), h1_rate,
                0.0001);
  }
}

// Two ranks and one micro-batch: forward takes 1 and 10, backward 2 + 3 and 20 + 30, transfers 0.5.
TEST(Simulate, TimesOfEachStageAndTransfers) {
  const Schedule schedule =
      make_schedule(ScheduleKind::gpipe, {.num_ranks = 2, .num_micro_batches = 1});
  const Timeline timeline =
      simulate(schedule, {.stages = {{1, 2, 3}, {10, 20, 30}}, .transfer = 0.5});
  ASSERT_EQ(timeline.ranks.size(), 2u);
  const auto& first = timeline.ranks[0];
  const auto& second = timeline.ranks[1];
  ASSERT_EQ(first.size(), 2u);
  ASSERT_EQ(second.size(), 2u);
  EXPECT_EQ(second[0].start, 1.5);
  EXPECT_EQ(second[1].end, 61.5);
  EXPECT_EQ(first[1].action, (Action{ActionKind::backward, 0, 0}));
  EXPECT_EQ(first[1].start, 62);
  EXPECT_EQ(first[1].end, 67);
  EXPECT_EQ(timeline.makespan(), 67);
  EXPECT_DOUBLE_EQ(bubble(timeline), 1 - 66.0 / (2 * 67));
  EXPECT_DOUBLE_EQ(bubble_between_own_ends(timeline), 1 - 66.0 / (2 * 67));
}

// A channel carries one message at a time: the second activation waits for the first.
TEST(Simulate, TransfersOfAChannelFollowEachOther) {
  const Schedule schedule =
      make_schedule(ScheduleKind::gpipe, {.num_ranks = 2, .num_micro_batches = 2});
  const Timeline timeline = simulate(schedule, {.stages = {{1, 1, 1}}, .transfer = 10});
  EXPECT_EQ(timeline.ranks[1][0].start, 11);
  EXPECT_EQ(timeline.ranks[1][1].start, 21);
}

TEST(Simulate, NamesMistakes) {
  const Schedule schedule = make_schedule(ScheduleKind::gpipe, {.num_ranks = 3});
  EXPECT_THAT(usage_error([&] {
                simulate(schedule, {.stages = {{}, {}}});
              }),
              HasSubstr("times for 2 stages, and the schedule has 3"));
  EXPECT_THAT(usage_error([&] { simulate(schedule, {.transfer = -1}); }), HasSubstr("-1"));
  EXPECT_THAT(usage_error([&] { simulate(schedule, {.stages = {{.forward = std::nan("")}}}); }),
              HasSubstr("nan"));
  EXPECT_THAT(usage_error([] { simulate(Schedule{}); }), HasSubstr("0 micro-batches"));
}

TEST(Simulate, AnEmptyTimelineHasNoBubble) {
  EXPECT_EQ(bubble({}), 0);
  EXPECT_EQ(bubble(simulate(make_schedule(ScheduleKind::gpipe, {}), {.stages = {{0, 0, 0}}})), 0);
}

}  // namespace
}  // namespace lockstep::pipeline
