#include <gmock/gmock.h>

#include <sstream>

#include <tests/base/files.h>

#include "training.h"

namespace lockstep::train::testing {
namespace {

std::vector<std::string> cells_of(const std::string& line) {
  std::istringstream text(line);
  std::vector<std::string> cells;
  for (std::string cell; std::getline(text, cell, ',');) cells.push_back(cell);
  return cells;
}

// For each row that has a loss, its values by column.
std::vector<std::map<std::string, double>> steps_of(const std::string& csv) {
  std::istringstream text(csv);
  std::string line;
  std::getline(text, line);
  const auto columns = cells_of(line);
  std::vector<std::map<std::string, double>> steps;
  while (std::getline(text, line)) {
    const auto cells = cells_of(line);
    std::map<std::string, double> row;
    for (std::size_t i = 0; i < cells.size(); ++i)
      if (!cells[i].empty()) row[columns.at(i)] = std::stod(cells[i]);
    if (row.count("loss") != 0) steps.push_back(row);
  }
  return steps;
}

TEST(Metrics, HoldTheTimesOfAStepsPartsWhereTheyAreAskedFor) {
  Training training;
  training.train(2);
  for (const auto& step : steps_of(lockstep::testing::read_file(training.output() / "metrics.csv")))
    EXPECT_EQ(step.count("forward_seconds"), 0u);

  training.set("/wall_clock_breakdown", true);
  training.train(2, "timed");
  const auto steps =
      steps_of(lockstep::testing::read_file(training.output("timed") / "metrics.csv"));
  ASSERT_EQ(steps.size(), 12u);
  double before = 0;
  for (const auto& step : steps) {
    double sum = 0;
    for (const char* part : {"data", "forward", "backward", "update"}) {
      const double seconds = step.at(std::string(part) + "_seconds");
      EXPECT_GT(seconds, 0) << part;
      sum += seconds;
    }
    EXPECT_LE(sum, step.at("seconds") - before) << "parts of a step are no longer than it";
    before = step.at("seconds");
  }
}

}  // namespace
}  // namespace lockstep::train::testing
