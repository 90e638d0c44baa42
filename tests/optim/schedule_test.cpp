#include <lockstep/optim/schedules/schedule.h>

#include <cmath>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The learning rate at DeepSpeed's own count, which is one behind ours.
double at(const ScheduleOptions& options, std::int64_t i, double base_lr = 1) {
  return make_schedule(options, base_lr)->learning_rate(i + 1);
}

std::string refusal(const ScheduleOptions& options, double base_lr = 1) {
  return usage_error([&] { make_schedule(options, base_lr); });
}

TEST(Constant, IsTheOptimizersOwn) {
  for (const std::int64_t step : {0, 1, 1000000})
    EXPECT_EQ(make_schedule(Constant{}, 3e-4)->learning_rate(step), 3e-4);
}

TEST(WarmupLR, GoldenValues) {
  const WarmupLR log{.warmup_num_steps = 100};
  EXPECT_NEAR(at(log, 9), 0.5, 1e-15);
  EXPECT_NEAR(at(log, 50), 0.853785, 5e-7);
  const WarmupLR linear{.warmup_num_steps = 100, .warmup_type = WarmupType::linear};
  EXPECT_DOUBLE_EQ(at(linear, 9), 0.09);
  EXPECT_DOUBLE_EQ(at(linear, 99), 0.99);
}

TEST(WarmupLR, EndsOfTheWarmup) {
  const WarmupLR options{.warmup_min_lr = 0.1, .warmup_max_lr = 0.6, .warmup_num_steps = 100};
  EXPECT_EQ(at(options, -1), 0.1);
  EXPECT_EQ(at(options, 0), 0.1);  // ln 1
  EXPECT_DOUBLE_EQ(at(options, 9), 0.35);
  EXPECT_DOUBLE_EQ(at(options, 99), 0.6);
  EXPECT_EQ(at(options, 100), 0.6);
  EXPECT_EQ(at(options, 1000000000000), 0.6);
}

TEST(WarmupLR, MaximumIsTheOptimizersUnlessGiven) {
  EXPECT_EQ(at(WarmupLR{.warmup_num_steps = 10}, 10, 0.02), 0.02);
  EXPECT_EQ(at(WarmupLR{.warmup_max_lr = 0.5, .warmup_num_steps = 10}, 10, 0.02), 0.5);
}

TEST(WarmupLR, LessThanTwoStepsAreTwo) {
  for (const std::int64_t num_steps : {0, 1, 2}) {
    const WarmupLR log{.warmup_num_steps = num_steps};
    EXPECT_EQ(at(log, -1), 0);
    EXPECT_EQ(at(log, 0), 0);
    EXPECT_EQ(at(log, 1), 1);
    EXPECT_EQ(at(log, 2), 1);
    const WarmupLR linear{.warmup_num_steps = num_steps, .warmup_type = WarmupType::linear};
    EXPECT_EQ(at(linear, 0), 0);
    EXPECT_EQ(at(linear, 1), 0.5);
    EXPECT_EQ(at(linear, 2), 1);
  }
}

TEST(WarmupDecayLR, GoldenValues) {
  const WarmupDecayLR options{.total_num_steps = 1000, .warmup_num_steps = 100};
  EXPECT_EQ(at(options, -1), 0);
  EXPECT_NEAR(at(options, 9), 0.5, 1e-15);
  EXPECT_DOUBLE_EQ(at(options, 99), 1);
  EXPECT_EQ(at(options, 100), 1);
  EXPECT_EQ(at(options, 550), 0.5);
  EXPECT_EQ(at(options, 1000), 0);
  EXPECT_EQ(at(options, 5000), 0);
}

TEST(WarmupDecayLR, FallsToTheMinimum) {
  const WarmupDecayLR options{.total_num_steps = 1000,
                              .warmup_min_lr = 0.2,
                              .warmup_max_lr = 1.2,
                              .warmup_num_steps = 100,
                              .warmup_type = WarmupType::linear};
  EXPECT_DOUBLE_EQ(at(options, 50), 0.7);
  EXPECT_DOUBLE_EQ(at(options, 550), 0.7);
  EXPECT_DOUBLE_EQ(at(options, 1001), 0.2);
}

TEST(WarmupDecayLR, AllOfItIsWarmup) {
  const WarmupDecayLR options{.total_num_steps = 10, .warmup_num_steps = 10};
  EXPECT_DOUBLE_EQ(at(options, 9), 1);
  EXPECT_EQ(at(options, 10), 0);
  const WarmupDecayLR tiny{.total_num_steps = 1, .warmup_num_steps = 0};
  EXPECT_EQ(at(tiny, 1), 1);
  EXPECT_EQ(at(tiny, 2), 0);
}

TEST(WarmupCosineLR, GoldenValues) {
  const WarmupCosineLR options{.total_num_steps = 1000, .warmup_num_steps = 100};
  EXPECT_NEAR(at(options, 9, 2), 1, 1e-15);
  EXPECT_NEAR(at(options, 549), 0.50005, 1e-15);
  EXPECT_NEAR(at(options, 999), 1e-4, 1e-15);
  EXPECT_NEAR(at(options, 100000, 3), 3e-4, 1e-15);
}

TEST(WarmupCosineLR, StartsAtNothingAndThenAtItsRatio) {
  const WarmupCosineLR options{.total_num_steps = 1000,
                               .warmup_min_ratio = 0.25,
                               .warmup_num_steps = 100,
                               .cos_min_ratio = 0.5,
                               .warmup_type = WarmupType::linear};
  EXPECT_EQ(at(options, -1), 0);
  EXPECT_EQ(at(options, 0), 0.25);
  EXPECT_DOUBLE_EQ(at(options, 50), 0.625);
  EXPECT_DOUBLE_EQ(at(options, 549), 0.75);
  EXPECT_DOUBLE_EQ(at(options, 999), 0.5);
  const WarmupCosineLR all_warmup{.total_num_steps = 2, .warmup_num_steps = 2, .cos_min_ratio = 0};
  EXPECT_NEAR(at(all_warmup, 2), 0, 1e-15);
}

TEST(OneCycle, UpDownAndOut) {
  const OneCycle options{.cycle_min_lr = 1,
                         .cycle_max_lr = 3,
                         .decay_lr_rate = 0.5,
                         .cycle_first_step_size = 100,
                         .cycle_second_step_size = 300,
                         .decay_step_size = 10};
  EXPECT_EQ(at(options, -1), 1);
  EXPECT_DOUBLE_EQ(at(options, 49), 2);
  EXPECT_DOUBLE_EQ(at(options, 99), 3);
  EXPECT_DOUBLE_EQ(at(options, 249), 2);
  EXPECT_DOUBLE_EQ(at(options, 399), 1);
  EXPECT_DOUBLE_EQ(at(options, 400), 1 / (1 + 0.5 * 1 / 10));
  EXPECT_DOUBLE_EQ(at(options, 419), 1 / (1 + 0.5 * 20 / 10));
}

TEST(OneCycle, BothHalvesAreAlikeAndNothingDecaysUnlessAsked) {
  const OneCycle options{.cycle_min_lr = 0.5, .cycle_max_lr = 1, .cycle_first_step_size = 10};
  EXPECT_DOUBLE_EQ(at(options, 4), 0.75);
  EXPECT_DOUBLE_EQ(at(options, 9), 1);
  EXPECT_DOUBLE_EQ(at(options, 14), 0.75);
  EXPECT_EQ(at(options, 20), 0.5);
  EXPECT_EQ(at(options, 100000), 0.5);
}

TEST(LRRangeTest, RisesWithoutEnd) {
  const LRRangeTest options{
      .lr_range_test_min_lr = 0.5, .lr_range_test_step_size = 10, .lr_range_test_step_rate = 2};
  EXPECT_EQ(at(options, -1), 0.5);
  EXPECT_DOUBLE_EQ(at(options, 4), 1);
  EXPECT_DOUBLE_EQ(at(options, 9), 1.5);
  EXPECT_DOUBLE_EQ(at(options, 99), 10.5);
  EXPECT_DOUBLE_EQ(at(LRRangeTest{}, 999), 1.5e-3);
}

TEST(LRRangeTest, Staircase) {
  const LRRangeTest options{.lr_range_test_min_lr = 0.5,
                            .lr_range_test_step_size = 10,
                            .lr_range_test_step_rate = 2,
                            .lr_range_test_staircase = true};
  EXPECT_EQ(at(options, 8), 0.5);
  EXPECT_EQ(at(options, 9), 1.5);
  EXPECT_EQ(at(options, 18), 1.5);
  EXPECT_EQ(at(options, 19), 2.5);
}

TEST(Schedule, ErrorsSayWhichNumberIsWrong) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(refusal(Constant{}, -0.25), HasSubstr("-0.25"));
  EXPECT_THAT(refusal(Constant{}, nan), HasSubstr("nan"));
  EXPECT_THAT(refusal(WarmupLR{.warmup_num_steps = -3}),
              AllOf(HasSubstr("WarmupLR"), HasSubstr("warmup_num_steps is -3")));
  EXPECT_THAT(refusal(WarmupLR{.warmup_min_lr = 0.5}, 0.25),
              AllOf(HasSubstr("warmup_min_lr is 0.5"), HasSubstr("warmup_max_lr, which is 0.25")));
  EXPECT_THAT(refusal(WarmupLR{.warmup_max_lr = nan}), HasSubstr("warmup_max_lr is nan"));
  EXPECT_THAT(refusal(WarmupDecayLR{}),
              AllOf(HasSubstr("WarmupDecayLR"), HasSubstr("total_num_steps is 0")));
  EXPECT_THAT(refusal(WarmupDecayLR{.total_num_steps = 99, .warmup_num_steps = 100}),
              AllOf(HasSubstr("warmup_num_steps is 100"), HasSubstr("which is 99")));
  EXPECT_THAT(refusal(WarmupCosineLR{.total_num_steps = -1}), HasSubstr("total_num_steps is -1"));
  EXPECT_THAT(refusal(WarmupCosineLR{.total_num_steps = 5000, .warmup_min_ratio = 1.5}),
              HasSubstr("warmup_min_ratio is 1.5"));
  EXPECT_THAT(refusal(WarmupCosineLR{.total_num_steps = 5000, .cos_min_ratio = -1}),
              HasSubstr("cos_min_ratio is -1"));
  EXPECT_THAT(refusal(OneCycle{}), HasSubstr("cycle_max_lr is 0"));
  EXPECT_THAT(refusal(OneCycle{.cycle_min_lr = 2, .cycle_max_lr = 1}),
              HasSubstr("cycle_min_lr is 2"));
  EXPECT_THAT(refusal(OneCycle{.cycle_max_lr = 1, .cycle_first_step_size = 0}),
              HasSubstr("cycle_first_step_size is 0"));
  EXPECT_THAT(refusal(OneCycle{.cycle_max_lr = 1, .cycle_second_step_size = -7}),
              HasSubstr("cycle_second_step_size is -7"));
  EXPECT_THAT(refusal(OneCycle{.cycle_max_lr = 1, .decay_lr_rate = 0.5}),
              AllOf(HasSubstr("decay_lr_rate is 0.5"), HasSubstr("decay_step_size is 0")));
  EXPECT_THAT(refusal(LRRangeTest{.lr_range_test_step_size = 0}),
              HasSubstr("lr_range_test_step_size is 0"));
  EXPECT_THAT(usage_error([] { make_schedule(Constant{}, 1)->learning_rate(-1); }),
              HasSubstr("step -1"));
}

struct Mine {
  double factor = 0.5;

  void describe(OptionKeys& keys, const RunFacts&) {
    keys.number({.name = "factor"}, factor, {.highest = 1});
  }
  std::vector<OptionMistake> mistakes(double) const { return {}; }
  std::unique_ptr<Schedule> make(double base_lr) const {
    return make_schedule(Constant{}, factor * base_lr);
  }
};

TEST(ScheduleTypes, TakeAProgramsOwn) {
  register_schedule("Mine", Mine{});
  EXPECT_EQ(schedule_types().back().name, "Mine");
  EXPECT_EQ(name_of(Mine{}), "Mine");
  EXPECT_EQ(make_schedule(Mine{.factor = 0.25}, 2)->learning_rate(5), 0.5);
  EXPECT_THAT(usage_error([] { register_schedule("oneCYCLE", Mine{}); }),
              HasSubstr("registered as 'oneCYCLE', which another one is called"));
}

// Steps beyond any training, and sizes whose sum would overflow, still give numbers.
TEST(Schedule, NothingOverflows) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  const std::vector<ScheduleOptions> all = {
      WarmupLR{.warmup_num_steps = huge}, WarmupDecayLR{.total_num_steps = huge},
      WarmupCosineLR{.total_num_steps = huge},
      OneCycle{.cycle_max_lr = 1, .cycle_first_step_size = huge, .cycle_second_step_size = huge},
      LRRangeTest{.lr_range_test_step_size = huge}};
  for (const auto& options : all)
    for (const std::int64_t step : {std::int64_t{0}, huge})
      EXPECT_TRUE(std::isfinite(make_schedule(options, 1)->learning_rate(step)));
}

}  // namespace
}  // namespace lockstep::optim
