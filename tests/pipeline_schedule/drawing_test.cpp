// Pictures of timelines.
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include "sizes.h"
#include "tests/observe/xml.h"

namespace lockstep::pipeline {
namespace {

using ::testing::Contains;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

Timeline simulated(ScheduleKind kind, int ranks, int micro_batches) {
  return simulate(make_schedule(kind, {.num_ranks = ranks, .num_micro_batches = micro_batches}));
}

std::vector<std::string> lines_in(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

constexpr TextStyle kAscii = {.characters = observe::Characters::ascii};

TEST(DrawText, ShowsMicroBatchesAndBubbles) {
  EXPECT_EQ(draw_text(simulated(ScheduleKind::one_forward_one_backward, 2, 2),
                      {.width = 44, .characters = observe::Characters::ascii}),
            "rank 0  F0--F1--........B0------....B1------\n"
            "rank 1  ....F0--B0------F1--B1------........\n"
            "        F forward, B backward, . idle\n");
  const auto split = draw_text(simulated(ScheduleKind::zb_h1, 2, 2), kAscii);
  EXPECT_THAT(split,
              HasSubstr("rank 1  ..........F0--------I0--------F1--------I1--------W0--------W1"));
  EXPECT_THAT(split, HasSubstr("I backward (input), W backward (weights)"));
}

TEST(DrawText, SaysWhereRanksHaveClocksOfTheirOwn) {
  Timeline timeline = simulated(ScheduleKind::gpipe, 2, 2);
  EXPECT_THAT(draw_text(timeline, kAscii), Not(HasSubstr("not aligned")));
  EXPECT_THAT(draw_svg(timeline), Not(HasSubstr("not aligned")));
  timeline.one_clock = false;
  EXPECT_THAT(draw_text(timeline, kAscii), HasSubstr("not aligned: hosts' clocks differ"));
  // The time that a rank waited before its first action is unknown.
  EXPECT_THAT(draw_svg(timeline), HasSubstr("not aligned, as their hosts' clocks differ"));
  EXPECT_THAT(draw_svg(timeline), Not(HasSubstr("bubble")));
}

TEST(DrawText, FitsItsWidth) {
  for (const ScheduleKind kind : testing::own_kinds)
    for (const int micro_batches : {1, 8, 20, 60})
      for (const int width : {40, 80, 132}) {
        TextStyle style = kAscii;
        style.width = width;
        const auto lines = lines_in(draw_text(simulated(kind, 11, micro_batches), style));
        ASSERT_EQ(lines.size(), 12u);
        const std::size_t row = lines.front().size();
        EXPECT_LE(row, static_cast<std::size_t>(width));
        EXPECT_GT(2 * row, static_cast<std::size_t>(width));
        for (std::size_t i = 0; i + 1 < lines.size(); ++i) EXPECT_EQ(lines[i].size(), row);
      }
}

TEST(DrawText, ManySpansAreShades) {
  const auto timeline = simulated(ScheduleKind::gpipe, 8, 64);
  const auto text = draw_text(timeline, kAscii);
  EXPECT_THAT(text, HasSubstr("rank 7  ..*#####"));
  EXPECT_THAT(text, Not(HasSubstr("F forward")));
  EXPECT_THAT(draw_text(timeline, {}), HasSubstr("rank 7  ··"));
}

TEST(DrawText, ColoursWhereTheyAreWanted) {
  const auto timeline = simulated(ScheduleKind::zb_h1, 2, 2);
  EXPECT_THAT(draw_text(timeline, {.colour = observe::Colour::basic}),
              ContainsRegex("\x1b\\[97;44mF0 *\x1b\\[0m"));
  EXPECT_THAT(draw_text(timeline, {}), Not(HasSubstr("\x1b")));
}

TEST(DrawText, ATimelineWithoutSpans) {
  EXPECT_THAT(lines_in(draw_text({})), SizeIs(1));
  EXPECT_THAT(lines_in(draw_text({.ranks = {{}, {}}}, kAscii)), Contains(HasSubstr("rank 1  ...")));
}

// A run would pass such times: each clock begins anywhere.
TEST(DrawText, AMeasuredTimeline) {
  Timeline timeline;
  timeline.ranks = {
      {{1000, 1001, {ActionKind::forward, 0, 0}}, {1003, 1004, {ActionKind::backward, 0, 0}}}};
  EXPECT_THAT(draw_text(timeline, {.width = 40, .characters = observe::Characters::ascii}),
              HasSubstr("rank 0  F0------................B0------\n"));
}

int count_boxes(const std::vector<observe::Element>& elements, const std::string& colour) {
  int count = 0;
  for (const auto& element : elements)
    if (element.name == "rect" && element.attributes.at("fill") == colour) ++count;
  return count;
}

TEST(DrawSvg, HasABoxForEachAction) {
  const auto elements = observe::parse_xml(
      draw_svg(simulated(ScheduleKind::zb_h1, 3, 4),
               {.title = "A <title>", .subtitle = "3 ranks", .time_unit = "ms"}));
  // One more box is in the legend.
  for (const char* colour : {"#2563eb", "#e4572e", "#0f9482"})
    EXPECT_EQ(count_boxes(elements, colour), 13) << colour;
  EXPECT_EQ(count_boxes(elements, "#eceff3"), 4);
  std::vector<std::string> texts;
  for (const auto& element : elements)
    if (element.name == "text") texts.push_back(element.text);
  for (const char* text : {"A <title> · bubble 14.3 %", "3 ranks", "rank 2", "3", "forward",
                           "backward: input", "backward: weights", "idle", "time (ms)"})
    EXPECT_THAT(texts, Contains(text));
  EXPECT_THAT(texts, Not(Contains("backward")));
}

TEST(DrawSvg, LaterStagesOfARankAreLighter) {
  const auto elements = observe::parse_xml(draw_svg(simulated(ScheduleKind::interleaved, 2, 4)));
  EXPECT_EQ(count_boxes(elements, "#2563eb"), 9);
  EXPECT_EQ(count_boxes(elements, "#acc4f7"), 9);
}

TEST(DrawSvg, BoxesStandWhereTheirSpansAre) {
  Timeline timeline;
  timeline.ranks = {{{100, 150, {ActionKind::forward, 0, 0}}},
                    {{150, 200, {ActionKind::forward, 1, 0}}}};
  std::vector<std::pair<double, double>> sides;
  for (const auto& element : observe::parse_xml(draw_svg(timeline))) {
    if (element.name != "rect" || element.attributes.at("fill") != "#2563eb") continue;
    const double left = std::stod(element.attributes.at("x"));
    sides.emplace_back(left, left + std::stod(element.attributes.at("width")));
  }
  // The first side is the legend's.
  ASSERT_THAT(sides, SizeIs(3));
  EXPECT_NEAR(sides[1].first, 84, 2);
  EXPECT_NEAR(sides[1].second, 84 + 848 / 2.0, 2);
  EXPECT_NEAR(sides[2].first, 84 + 848 / 2.0, 2);
  EXPECT_NEAR(sides[2].second, 84 + 848, 2);
}

TEST(DrawSvg, AnythingCanBeDrawn) {
  EXPECT_NO_THROW(observe::parse_xml(draw_svg({})));
  EXPECT_NO_THROW(observe::parse_xml(draw_svg(simulated(ScheduleKind::interleaved, 16, 64))));
}

}  // namespace
}  // namespace lockstep::pipeline
