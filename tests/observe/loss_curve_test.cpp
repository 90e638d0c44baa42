#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <sstream>

#include <lockstep/observe/csv_file.h>
#include <lockstep/observe/loss_curve.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "xml.h"

namespace lockstep::observe {
namespace {

using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::Contains;
using ::testing::HasSubstr;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Picture {
  std::vector<std::string> texts;
  std::vector<std::vector<std::pair<double, double>>> lines;  // the polylines
  std::vector<std::pair<double, double>> dots;
};

double coordinate(const std::string& text, double largest) {
  std::size_t used = 0;
  const double value = std::stod(text, &used);
  EXPECT_EQ(used, text.size()) << text;
  EXPECT_GE(value, 0) << text;
  EXPECT_LE(value, largest) << text;
  return value;
}

// Draws the curve, and checks that the document is well formed, that everything is inside of it,
// and that the data is inside of the axes.
Picture drawn(const LossCurve& curve) {
  Picture picture;
  const auto elements = parse_xml(draw_svg(curve));
  EXPECT_EQ(elements.front().name, "svg");
  EXPECT_EQ(elements.front().attributes.at("viewBox"), "0 0 960 540");
  for (const auto& element : elements) {
    for (const auto& [name, value] : element.attributes) {
      if (name == "x" || name == "x1" || name == "x2" || name == "cx") coordinate(value, 960);
      if (name == "y" || name == "y1" || name == "y2" || name == "cy") coordinate(value, 540);
    }
    if (element.name == "text") picture.texts.push_back(element.text);
    if (element.name == "circle")
      picture.dots.emplace_back(std::stod(element.attributes.at("cx")),
                                std::stod(element.attributes.at("cy")));
    if (element.name == "polyline") {
      auto& line = picture.lines.emplace_back();
      std::istringstream points(element.attributes.at("points"));
      for (std::string point; points >> point;) {
        const auto comma = point.find(',');
        line.emplace_back(coordinate(point.substr(0, comma), 960),
                          coordinate(point.substr(comma + 1), 540));
        EXPECT_GE(line.back().first, 76);
        EXPECT_LE(line.back().first, 932);
        EXPECT_GE(line.back().second, 104);
        EXPECT_LE(line.back().second, 484);
      }
    }
  }
  return picture;
}

LossCurve falling(int num_steps) {
  LossCurve curve;
  std::mt19937 random(5);
  std::normal_distribution<double> noise(0, 0.05);
  for (int step = 1; step <= num_steps; ++step) {
    const double loss = 1.4 + 4 * std::pow(1 + step / 40.0, -0.9);
    curve.training.push_back({step, loss + noise(random)});
    if (step % (num_steps / 10) == 0) curve.validation.push_back({step, loss + 0.1});
  }
  return curve;
}

TEST(LossCurve, HasTitleLegendAxesAndBothSeries) {
  LossCurve curve = falling(1000);
  curve.title = "GPT";
  curve.subtitle = "2.7 M parameters, 2 ranks";
  curve.reference = {"unigram entropy", 3.12};
  const auto picture = drawn(curve);
  for (const std::string text : {"GPT", "2.7 M parameters, 2 ranks", "step", "loss", "0", "200",
                                 "1000", "2", "5", "unigram entropy 3.12"})
    EXPECT_THAT(picture.texts, Contains(text));
  EXPECT_THAT(picture.texts, Contains(::testing::StartsWith("training 1.")));
  EXPECT_THAT(picture.texts, Contains(::testing::StartsWith("validation 1.")));
  ASSERT_EQ(picture.lines.size(), 3u);  // raw, smoothed, validation
  EXPECT_EQ(picture.dots.size(), 11u);  // ten, and the legend's
  // The curve falls, which is down on the screen, and ends at the last step, at the right edge.
  const auto& smoothed = picture.lines[1];
  EXPECT_LT(smoothed.front().second, 200);
  EXPECT_GT(smoothed.back().second, 400);
  EXPECT_DOUBLE_EQ(smoothed.back().first, 932);
}

TEST(LossCurve, AMillionStepsAreFewPointsAndNoSpikeIsLost) {
  LossCurve curve;
  for (int step = 1; step <= 1'000'000; ++step) curve.training.push_back({step, 2 + 1.0 / step});
  curve.training[654321].value = 9;
  curve.training[123456].value = 0.5;
  const auto picture = drawn(curve);
  ASSERT_EQ(picture.lines.size(), 2u);
  for (const auto& line : picture.lines) EXPECT_LE(line.size(), 1000u);
  const auto [high, low] =
      std::ranges::minmax(picture.lines[0], {}, [](auto& p) { return p.second; });
  EXPECT_LT(high.second, 160);
  EXPECT_GT(low.second, 440);
  EXPECT_NEAR(high.first, 76 + 0.654321 * 856, 2);
  EXPECT_THAT(picture.texts, Contains("1.0M"));
}

TEST(LossCurve, NotANumberAndInfinityAreGaps) {
  LossCurve curve = falling(100);
  for (int i = 40; i < 50; ++i) curve.training[i].value = i % 2 == 0 ? kNaN : kInfinity;
  curve.training[45].value = 2;  // a single point between gaps
  curve.training[99].value = 1e200;
  curve.validation[3].value = kNaN;
  curve.reference = {"nothing", kNaN};
  const auto picture = drawn(curve);
  EXPECT_EQ(picture.lines.size(), 6u);  // each series is in two parts
  EXPECT_EQ(picture.dots.size(), 2u + 10u);
  EXPECT_THAT(picture.texts, ::testing::Not(Contains(HasSubstr("nan"))));
  EXPECT_THAT(picture.texts, ::testing::Not(Contains(HasSubstr("nothing"))));
}

TEST(LossCurve, IsLogarithmicWhereLossesSpanMuch) {
  LossCurve curve;
  for (int step = 0; step <= 100; ++step)
    curve.training.push_back({step, std::pow(10.0, 2 - 0.04 * step)});
  auto picture = drawn(curve);
  EXPECT_THAT(picture.texts, Contains("loss (logarithmic)"));
  for (const std::string text : {"0.01", "0.1", "1", "10", "100"})
    EXPECT_THAT(picture.texts, Contains(text));
  // The line is straight there.
  const auto& line = picture.lines[0];
  EXPECT_NEAR(line[50].second, (line.front().second + line.back().second) / 2, 0.2);

  curve.training[7].value = 0;
  picture = drawn(curve);
  EXPECT_THAT(picture.texts, Contains("loss"));
}

TEST(LossCurve, DrawsWhateverThereIs) {
  drawn({});
  drawn({.training = {{5, kNaN}}});
  auto picture = drawn({.training = {{7, 2.5}}});
  EXPECT_EQ(picture.dots.size(), 1u);
  EXPECT_THAT(picture.texts, Contains("7"));
  picture = drawn({.training = {{1, 0.6931}, {2, 0.6931}, {3, 0.6931}}});
  ASSERT_EQ(picture.lines.size(), 1u);
  EXPECT_NEAR(picture.lines[0][1].second, (104.0 + 484.0) / 2, 1);
  drawn({.training = {{1, 0}, {2, 0}}});
  drawn({.training = {{1, -3}, {2, 5}}});
  drawn({.training = {{1, 1e-300}, {2, 1e-310}}});
  drawn({.training = {{1, 1e99}, {2, -1e99}, {3, 1e-300}}});
  drawn({.training = {{1, 1e99}, {2, 1e-99}}});
  drawn({.training = {{1, 1}, {2, 1 + 1e-15}}});
  drawn({.training = {{std::numeric_limits<std::int64_t>::min(), 1},
                      {std::numeric_limits<std::int64_t>::max(), 2}}});
  drawn({.validation = {{1'000'000'000'000, 1}, {1'000'000'000'001, 2}}});
  LossCurve spiky = falling(1000);
  spiky.training[500].value = 1e99;
  drawn(spiky);
}

TEST(LossCurve, StepsNeedNotBeInOrderAndTheLastOfEqualsCounts) {
  EXPECT_EQ(in_order({{3, 1}, {1, 5}, {3, 2}, {2, 4}}),
            (std::vector<Point>{{1, 5}, {2, 4}, {3, 2}}));
}

TEST(LossCurve, AnyTextIsSafe) {
  LossCurve curve = falling(50);
  curve.title = "a<b> & \"c\" \x01\n \xff\xc0\x80 \xed\xa0\x80 ü 深";
  curve.reference = {"</svg>", 3};
  const auto picture = drawn(curve);
  EXPECT_THAT(picture.texts, Contains(HasSubstr("a<b> & \"c\"")));
  EXPECT_THAT(picture.texts, Contains(::testing::EndsWith("ü 深")));
  EXPECT_THAT(picture.texts, Contains("</svg> 3"));
}

TEST(LossCurve, TextThatIsTooLongIsCutBetweenCharacters) {
  LossCurve curve = falling(50);
  for (int i = 0; i < 300; ++i) curve.title += "ü";
  curve.reference = {std::string(300, 'x'), 3};
  const auto picture = drawn(curve);
  EXPECT_THAT(picture.texts, Contains(::testing::MatchesRegex("Training loss(ü)+…")));
  EXPECT_THAT(picture.texts, Contains(::testing::MatchesRegex("x+…")));
}

TEST(LossCurve, IsReadFromTheMetricsFile) {
  const TemporaryFolder folder;
  CsvFile file(folder / "metrics.csv");
  file.record(1, std::vector<Metric>{{"loss", 2.5}});
  file.record(2, std::vector<Metric>{{"loss", kNaN}, {"validation_loss", 2.25}});
  file.record(2, std::vector<Metric>{{"learning_rate", 0.1}});
  const auto curve = read_loss_curve(folder / "metrics.csv");
  ASSERT_EQ(curve.training.size(), 2u);
  EXPECT_EQ(curve.training[0], (Point{1, 2.5}));
  EXPECT_TRUE(std::isnan(curve.training[1].value));
  EXPECT_EQ(curve.validation, (std::vector<Point>{{2, 2.25}}));

  write_file(folder / "other.csv", "step,accuracy\n1,2\n");
  EXPECT_THAT(usage_error([&] { read_loss_curve(folder / "other.csv"); }),
              HasSubstr("other.csv' has neither a column 'loss'"));
  EXPECT_THAT(usage_error([&] { read_loss_curve(folder / "missing.csv"); }),
              HasSubstr("missing.csv"));
}

TEST(Smooth, KeepsAStraightLineAndHalvesNoise) {
  std::vector<Point> line;
  std::vector<Point> noise;
  for (int i = 0; i < 101; ++i) {
    line.push_back({i, 3.0 * i + 1});
    noise.push_back({i, i % 2 == 0 ? 1.0 : -1.0});
  }
  const auto smoothed_line = smooth(line, 10);
  for (std::size_t i = 0; i < line.size(); ++i)
    EXPECT_NEAR(smoothed_line[i].value, line[i].value, 1e-9);
  const auto smoothed = smooth(noise, 10);
  for (std::size_t i = 20; i < 80; ++i) EXPECT_LT(std::abs(smoothed[i].value), 0.05);
  // Neither end of the curve depends only on its last point.
  EXPECT_LT(std::abs(smoothed.front().value), 0.2);
  EXPECT_LT(std::abs(smoothed.back().value), 0.2);
  EXPECT_EQ(smooth(noise, 0), noise);
  EXPECT_EQ(smooth(std::span(noise).first(2), 10), (std::vector<Point>{noise[0], noise[1]}));
}

}  // namespace
}  // namespace lockstep::observe
