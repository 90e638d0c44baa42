#include <lockstep/optim/schedules/loss_scale.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"

namespace lockstep::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The scale after each step of a run: 'o' is a step that overflowed, '.' one that did not.
std::vector<double> scales(LossScale& scale, const std::string& steps) {
  std::vector<double> result;
  for (const char step : steps) {
    scale.update(step == 'o');
    result.push_back(scale.value());
  }
  return result;
}

std::vector<double> scales(const LossScaleOptions& options, const std::string& steps) {
  LossScale scale(options);
  return scales(scale, steps);
}

struct Rule {
  const char* name;
  LossScaleOptions options;
  std::string steps;
  std::vector<double> expected;
};

// The initial scale is 2^4 = 16, so that a few steps get far.
const std::vector<Rule> kRules = {
    {"WindowDoubles",
     {.initial_scale_power = 4, .loss_scale_window = 3},
     ".......",
     {16, 16, 32, 32, 32, 64, 64}},
    {"OverflowStartsTheWindowAnew",
     {.initial_scale_power = 4, .loss_scale_window = 3, .hysteresis = 1},
     "..o..o...",
     {16, 16, 8, 8, 8, 4, 4, 4, 8}},
    {"HysteresisIsUsedUpFirst",
     {.initial_scale_power = 4, .loss_scale_window = 100, .hysteresis = 3},
     "ooooo",
     {16, 16, 8, 4, 2}},
    {"GoodStepsBetweenDoNotRefillIt",
     {.initial_scale_power = 4, .loss_scale_window = 100, .hysteresis = 2},
     "o..o.o",
     {16, 16, 16, 8, 8, 4}},
    {"TheWindowRefillsIt",
     {.initial_scale_power = 4, .loss_scale_window = 2, .hysteresis = 2},
     "oo..oo",
     {16, 8, 8, 16, 16, 8}},
    {"ConsecutiveHysteresisIsRefilledByAnyGoodStep",
     {.initial_scale_power = 4,
      .loss_scale_window = 100,
      .hysteresis = 2,
      .consecutive_hysteresis = true},
     "o.o.oo.oo",
     {16, 16, 16, 16, 16, 8, 8, 8, 4}},
    {"AnOverflowWithinTheHysteresisStartsTheWindowAnew",
     {.initial_scale_power = 4, .loss_scale_window = 3, .hysteresis = 2},
     "..o...",
     {16, 16, 16, 16, 16, 32}},
    {"TheMinimumHolds",
     {.initial_scale_power = 4, .loss_scale_window = 2, .hysteresis = 1, .min_loss_scale = 6},
     "oo..o",
     {8, 6, 6, 12, 6}},
    {"AWindowOfOne", {.initial_scale_power = 0, .loss_scale_window = 1}, "...", {2, 4, 8}},
    {"Fixed", {.loss_scale = 100}, "..ooo..", {100, 100, 100, 100, 100, 100, 100}},
};

TEST(LossScale, Rules) {
  for (const Rule& rule : kRules)
    EXPECT_EQ(scales(rule.options, rule.steps), rule.expected) << rule.name;
}

// Computes the rules as DeepSpeed counts: by iterations, and the last one that overflowed.
TEST(LossScale, AgreesWithDeepSpeedsCountOnLongRuns) {
  for (const bool consecutive : {false, true})
    for (const std::int64_t hysteresis : {1, 2, 5}) {
      const std::int64_t window = 7;
      LossScale scale({.initial_scale_power = 40,
                       .loss_scale_window = window,
                       .hysteresis = hysteresis,
                       .consecutive_hysteresis = consecutive});
      double expected = std::ldexp(1, 40);
      std::int64_t left = hysteresis;
      std::int64_t last_overflow = -1;
      for (std::int64_t i = 0; i < 5000; ++i) {
        const bool overflowed = (i * i + i / 3) % 11 == 0 && i % 200 < 100;
        if (overflowed) {
          if (left == 1) expected = std::max(expected / 2, 1.0);
          if (left > 1) --left;
          last_overflow = i;
        } else {
          if (consecutive) left = hysteresis;
          if ((i - last_overflow) % window == 0) {
            expected = std::min(expected * 2, std::ldexp(1, 127));
            left = hysteresis;
          }
        }
        scale.update(overflowed);
        ASSERT_EQ(scale.value(), expected) << i;
      }
    }
}

TEST(LossScale, Defaults) {
  LossScale scale({});
  EXPECT_EQ(scale.value(), 65536);
  scale.update(true);
  EXPECT_EQ(scale.value(), 65536);
  for (int step = 0; step < 999; ++step) scale.update(false);
  EXPECT_EQ(scale.value(), 65536);
  scale.update(false);
  EXPECT_EQ(scale.value(), 131072);
}

TEST(LossScale, StaysAFloat) {
  LossScale scale({.initial_scale_power = 126, .loss_scale_window = 1});
  for (int step = 0; step < 10; ++step) scale.update(false);
  EXPECT_EQ(scale.value(), std::ldexp(1, 127));
  EXPECT_TRUE(std::isfinite(static_cast<float>(scale.value())));
}

TEST(LossScale, AtTheMinimumItSaysWhatToTry) {
  LossScale scale({.initial_scale_power = 1, .hysteresis = 2, .min_loss_scale = 1});
  EXPECT_EQ(scales(scale, "oo"), (std::vector<double>{2, 1}));
  const LossScaleState before = scale.state();
  EXPECT_THAT(
      usage_error([&] { scale.update(true); }),
      AllOf(HasSubstr("min_loss_scale = 1"), HasSubstr("learning rate"), HasSubstr("bf16")));
  EXPECT_EQ(scale.state(), before);
  // After a window of good steps the scale has room to halve again.
  EXPECT_EQ(scales(scale, std::string(1000, '.')).back(), 2);
  EXPECT_EQ(scales(scale, "oo"), (std::vector<double>{2, 1}));
}

TEST(LossScale, HysteresisComesBeforeTheErrorAtTheMinimum) {
  LossScale scale({.initial_scale_power = 0, .hysteresis = 2});
  scale.update(true);
  EXPECT_THAT(usage_error([&] { scale.update(true); }), HasSubstr("min_loss_scale"));
}

TEST(LossScale, ASavedStateGoesOn) {
  const LossScaleOptions options{.initial_scale_power = 4, .loss_scale_window = 3, .hysteresis = 2};
  const std::string run = "..o...oo.o....o..o..";
  const std::vector<double> whole = scales(options, run);
  for (std::size_t cut = 0; cut <= run.size(); ++cut) {
    LossScale first(options);
    scales(first, run.substr(0, cut));
    LossScale second(options);
    second.load_state(first.state());
    EXPECT_EQ(scales(second, run.substr(cut)),
              std::vector<double>(whole.begin() + static_cast<std::ptrdiff_t>(cut), whole.end()))
        << cut;
  }
}

TEST(LossScale, ASavedStateIsFittedToOtherOptions) {
  const LossScaleState saved{.scale = 4, .good_steps = 50, .hysteresis = 9};
  LossScale narrow({.loss_scale_window = 10, .hysteresis = 2, .min_loss_scale = 8});
  narrow.load_state(saved);
  EXPECT_EQ(narrow.value(), 8);
  EXPECT_EQ(narrow.state().hysteresis, 2);
  narrow.update(false);  // more good steps than the window asks for
  EXPECT_EQ(narrow.value(), 16);
  LossScale fixed({.loss_scale = 128});
  fixed.load_state(saved);
  EXPECT_EQ(fixed.value(), 128);
  LossScale dynamic({});
  dynamic.load_state(fixed.state());
  EXPECT_EQ(dynamic.value(), 128);
}

TEST(LossScale, RefusesOptions) {
  const auto refusal = [](const LossScaleOptions& options) {
    return usage_error([&] { LossScale scale(options); });
  };
  EXPECT_THAT(refusal({.loss_scale = -1}), HasSubstr("loss_scale is -1"));
  EXPECT_THAT(refusal({.loss_scale = std::nan("")}), HasSubstr("loss_scale is nan"));
  EXPECT_THAT(refusal({.loss_scale = 1e39}), HasSubstr("1e+39"));
  EXPECT_THAT(refusal({.initial_scale_power = -1}), HasSubstr("initial_scale_power is -1"));
  EXPECT_THAT(refusal({.initial_scale_power = 128}), HasSubstr("0 to 127"));
  EXPECT_THAT(refusal({.loss_scale_window = 0}), HasSubstr("loss_scale_window is 0"));
  EXPECT_THAT(refusal({.hysteresis = 0}), HasSubstr("hysteresis is 0"));
  EXPECT_THAT(refusal({.min_loss_scale = 0}), HasSubstr("min_loss_scale is 0"));
  EXPECT_THAT(refusal({.min_loss_scale = std::nan("")}), HasSubstr("nan"));
  EXPECT_THAT(refusal({.initial_scale_power = 3, .min_loss_scale = 9}),
              AllOf(HasSubstr("min_loss_scale is 9"), HasSubstr("up to the 8")));
}

TEST(LossScale, RefusesStatesThatNoRunLeaves) {
  LossScale scale({});
  const std::vector<LossScaleState> damaged = {
      {.scale = 0},
      {.scale = -2},
      {.scale = std::numeric_limits<double>::infinity()},
      {.scale = std::nan("")},
      {.scale = 2, .good_steps = -1},
      {.scale = 2, .hysteresis = 0},
  };
  const LossScaleState before = scale.state();
  for (const LossScaleState& state : damaged)
    EXPECT_THAT(usage_error([&] { scale.load_state(state); }), HasSubstr("damaged"));
  EXPECT_EQ(scale.state(), before);
}

}  // namespace
}  // namespace lockstep::optim
