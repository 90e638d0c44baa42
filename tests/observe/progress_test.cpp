#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include <lockstep/observe/progress_bar.h>

#include "screen.h"

namespace lockstep::observe {
namespace {

using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Progress kProgress = {
    .step = 340, .loss = 1.8724, .validation_loss = 1.901, .rate = 41234, .seconds_left = 111.4};
const ProgressContext kContext = {.total_steps = 1000, .loss_trend = Trend::falling};

const Clock::time_point kStart{seconds(1000)};

TEST(ProgressFormat, Numbers) {
  EXPECT_EQ(format_loss(1.87249), "1.872");
  EXPECT_EQ(format_loss(9.9996), "10.00");
  EXPECT_EQ(format_loss(123.456), "123.5");
  EXPECT_EQ(format_loss(99999.4), "99999");
  EXPECT_EQ(format_loss(3.2e12), "3.2e+12");
  EXPECT_EQ(format_loss(-0.5), "-0.500");
  EXPECT_EQ(format_loss(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(format_rate(0.5), "0.50");
  EXPECT_EQ(format_rate(41234), "41.2k");
  EXPECT_EQ(format_rate(999.7), "1.00k");
  EXPECT_EQ(format_rate(999.4), "999");
  EXPECT_EQ(format_rate(2.5e6), "2.50M");
  EXPECT_EQ(format_span(0), "0:00");
  EXPECT_EQ(format_span(59.2), "1:00");
  EXPECT_EQ(format_span(111.4), "1:52");
  EXPECT_EQ(format_span(7420), "2:03:40");
  EXPECT_EQ(format_span(3600 * 100), "4d 04h");
  EXPECT_EQ(format_span(std::numeric_limits<double>::infinity()), "-:--");
  EXPECT_EQ(format_span(std::numeric_limits<double>::quiet_NaN()), "-:--");
}

TEST(BarLine, ShowsEverythingWhereThereIsRoom) {
  EXPECT_EQ(bar_line(kProgress, kContext, {.width = 92, .characters = Characters::unicode}),
            "step  340/1000  ━━━━━━╾─────────────   34%  loss 1.872 ↓  val 1.901  41.2k tok/s  "
            "left 1:52");
  EXPECT_EQ(bar_line(kProgress, kContext, {.width = 92}),
            "step  340/1000  [======>.............]   34%  loss 1.872  val 1.901  41.2k tok/s  "
            "left 1:52");
}

// On a GPU: the share of its peak, and the memory that was taken.
TEST(BarLine, ShowsShareOfPeakAndMemoryWhereTheyAreKnown) {
  Progress progress = kProgress;
  progress.share_of_peak = 0.437;
  progress.memory_bytes = 25.84 * (1ull << 30);
  EXPECT_EQ(plain_line(progress, kContext),
            "step 340/1000  34%  loss 1.872  val 1.901  41.2k tok/s  MFU 44%  25.8 GiB  left 1:52");
  EXPECT_THAT(bar_line(progress, kContext, {.width = 110}),
              HasSubstr("41.2k tok/s  MFU 44%  25.8 GiB  left 1:52"));
  // These are the first to be left out.
  EXPECT_EQ(bar_line(progress, kContext, {.width = 82}),
            bar_line(kProgress, kContext, {.width = 82}));
  progress.memory_bytes = 310.4 * (1 << 20);
  EXPECT_THAT(plain_line(progress, kContext), HasSubstr("MFU 44%  310 MiB"));
}

TEST(BarLine, FitsEveryWidthAndIsNeverWiderThanItsBarNeeds) {
  for (const auto characters : {Characters::ascii, Characters::unicode}) {
    for (const auto colour : {Colour::none, Colour::basic}) {
      for (int width = 1; width <= 250; ++width) {
        Screen screen(width);
        screen.write(bar_line(kProgress, kContext,
                              {.width = width, .characters = characters, .colour = colour}));
        ASSERT_EQ(screen.num_wraps(), 0) << "width " << width;
        ASSERT_LE(screen.column(), static_cast<std::size_t>(std::max(width - 1, 1)));
        ASSERT_EQ(screen.coloured() && width > 40, colour == Colour::basic && width > 40);
        ASSERT_EQ(screen.unknown(), "");
        const auto lines = screen.lines();
        ASSERT_EQ(lines.size(), 1u);
        if (width > 30) {
          ASSERT_THAT(lines[0], HasSubstr("loss 1.872"));
        }
        if (width > 50) {
          ASSERT_THAT(lines[0], HasSubstr("left 1:52"));
        }
        ASSERT_LE(screen.column(), 120u);
      }
    }
  }
}

TEST(BarLine, TheBarIsEmptyAtTheStartAndFullAtTheEndOnly) {
  const auto line = [](std::int64_t step) {
    return bar_line({.step = step, .loss = 1}, {.total_steps = 100000}, {.width = 60});
  };
  EXPECT_THAT(line(0), HasSubstr("[>......"));
  EXPECT_THAT(line(0), HasSubstr("  0%"));
  EXPECT_THAT(line(99999), HasSubstr("=>]   99%"));
  EXPECT_THAT(line(100000), HasSubstr("==]  100%"));
  EXPECT_THAT(line(200000), HasSubstr("==]  100%"));
  EXPECT_THAT(line(1), HasSubstr("left -:--"));
}

TEST(ProgressDisplay, IsRedrawnAtMostTenTimesASecond) {
  ProgressDisplay display({.total_steps = 100000, .kind = DisplayKind::live}, kStart);
  int drawn = 0;
  for (int i = 0; i < 5000; ++i) {
    const auto frame = display.update({.step = i, .loss = 1}, 80, kStart + i * milliseconds(1));
    drawn += frame.empty() ? 0 : 1;
  }
  EXPECT_EQ(drawn, 50);
}

TEST(ProgressDisplay, TimeLeftSettlesAtOnceAfterASlowFirstStep) {
  ProgressDisplay display({.total_steps = 1000, .kind = DisplayKind::live}, kStart);
  display.update({.step = 1, .loss = 1}, 80, kStart + seconds(20));
  std::string frame;
  for (int step = 2; step <= 20; ++step)
    frame = display.update({.step = step, .loss = 1}, 80,
                           kStart + seconds(20) + (step - 1) * milliseconds(500));
  EXPECT_THAT(frame, HasSubstr("left 8:10"));  // 980 steps of half a second
}

TEST(ProgressDisplay, TheArrowSaysWhereTheLossIsGoing) {
  ProgressDisplay display(
      {.total_steps = 1000, .kind = DisplayKind::live, .characters = Characters::unicode}, kStart);
  std::int64_t step = 0;
  const auto after = [&](double loss) {
    ++step;
    return display.update({.step = step, .loss = loss}, 100, kStart + step * seconds(1));
  };
  std::string frame;
  for (int i = 0; i < 10; ++i) frame = after(5);
  EXPECT_THAT(frame, ::testing::Not(HasSubstr("↓")));
  for (int i = 0; i < 20; ++i) frame = after(5 - 0.1 * i);
  EXPECT_THAT(frame, HasSubstr("loss 3.100 ↓"));
  frame = after(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(frame, HasSubstr("loss   nan ↓"));
  for (int i = 0; i < 40; ++i) frame = after(5 + 0.1 * i);
  EXPECT_THAT(frame, HasSubstr("↑"));
}

std::vector<std::string> plain_lines(ProgressDisplay::Options options, int num_steps,
                                     milliseconds step_time) {
  options.kind = DisplayKind::plain;
  ProgressDisplay display(options, kStart);
  Screen screen(200);
  auto now = kStart;
  for (int step = 1; step <= num_steps; ++step)
    screen.write(display.update({.step = step, .loss = 2, .rate = 1500}, 80, now += step_time));
  screen.write(display.finish(80, now));
  screen.write(display.finish(80, now));
  EXPECT_FALSE(screen.coloured());
  return screen.lines();
}

TEST(ProgressDisplay, ALogGetsTheFirstStepTheLastAndOneEverySoOften) {
  EXPECT_THAT(plain_lines({.total_steps = 60}, 60, milliseconds(500)),
              ElementsAre("step 1/60  1%  loss 2.000  1.50k tok/s  left -:--",
                          "step 21/60  35%  loss 2.000  1.50k tok/s  left 0:20",
                          "step 41/60  68%  loss 2.000  1.50k tok/s  left 0:10",
                          "step 60/60  100%  loss 2.000  1.50k tok/s  took 0:30"));
  EXPECT_THAT(plain_lines({.total_steps = 25, .rate_unit = "samples/s", .plain_every_steps = 10},
                          25, milliseconds(100)),
              ElementsAre("step 1/25  4%  loss 2.000  1.50k samples/s  left -:--",
                          "step 10/25  40%  loss 2.000  1.50k samples/s  left 0:02",
                          "step 20/25  80%  loss 2.000  1.50k samples/s  left 0:01",
                          "step 25/25  100%  loss 2.000  1.50k samples/s  took 0:03"));
}

TEST(ProgressDisplay, NotesStandAboveTheBarAndNothingIsLeftOfWhatItCovered) {
  ProgressDisplay display({.total_steps = 10, .kind = DisplayKind::live}, kStart);
  Screen screen(80);
  screen.write(display.note("before", 80));
  screen.write(display.update({.step = 1, .loss = 123.4, .rate = 99999}, 80, kStart));
  screen.write(display.note("saved checkpoint-1", 80));
  screen.write(display.update({.step = 2, .loss = 2}, 80, kStart + seconds(1)));
  screen.write(display.note("two\nlines\n", 80));
  auto lines = screen.lines();
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_THAT(lines[4], ::testing::StartsWith("step  2/10  [==="));
  lines.pop_back();
  EXPECT_THAT(lines, ElementsAre("before", "saved checkpoint-1", "two", "lines"));
  screen.write(display.finish(80, kStart + seconds(2)));
  screen.write(display.note("after", 80));
  lines = screen.lines();
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_THAT(lines[4], HasSubstr("took 0:02"));
  EXPECT_EQ(lines[5], "after");
  EXPECT_EQ(screen.column(), 0u);
}

TEST(ProgressDisplay, ATerminalThatBecomesNarrowerOrWiderKeepsNoRemnants) {
  ProgressDisplay display({.total_steps = 1000, .kind = DisplayKind::live}, kStart);
  Screen screen(120);
  screen.write("$ lockstep train\n");
  int step = 0;
  for (const int width : {120, 50, 119, 20, 90, 9, 200}) {
    screen.resize(width);
    screen.write(display.update(kProgress, width, kStart + ++step * seconds(1)));
    std::string shown;
    for (const auto& line : screen.lines()) shown += line;
    EXPECT_EQ(shown,
              "$ lockstep train" + bar_line(kProgress, {.total_steps = 1000}, {.width = width}));
  }
  EXPECT_EQ(screen.num_wraps(), 0);
}

TEST(ProgressDisplay, ErasesWhatIsBelowOnlyWhereTheTerminalBecameNarrower) {
  ProgressDisplay display({.total_steps = 1000, .kind = DisplayKind::live}, kStart);
  auto drawn = [&, step = 0](int width) mutable {
    return display.update(kProgress, width, kStart + ++step * seconds(1));
  };
  for (const int width : {80, 80, 100})
    EXPECT_THAT(drawn(width), ::testing::StartsWith("\r\x1b[K")) << width;
  EXPECT_THAT(drawn(60), ::testing::StartsWith("\r\x1b[J"));
}

TEST(ProgressDisplay, ARunOfNoStepsSaysNothing) {
  ProgressDisplay display({.kind = DisplayKind::live}, kStart);
  EXPECT_EQ(display.finish(80, kStart), "");
}

}  // namespace
}  // namespace lockstep::observe
