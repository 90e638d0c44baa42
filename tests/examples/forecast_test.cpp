// A forecaster learns, the same on one rank and on two, and goes on where it was.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr const char* kConfig = LOCKSTEP_EXAMPLES "/forecast_series.json";

std::vector<double> validation_losses(const std::string& output) {
  std::vector<double> found;
  for (const std::string& line : launch::testing::lines_of(output))
    if (const auto at = line.find("validation loss "); at != std::string::npos)
      found.push_back(std::atof(line.c_str() + at + 16));
  return found;
}

TEST(ForecastSeries, LearnsTheSameOnOneRankAndTwoAndGoesOn) {
  const launch::testing::Folder folder;
  const std::string one = folder.path() / "one", two = folder.path() / "two";
  Launched alone = run_ranks(1, FORECAST_SERIES, {kConfig, one});
  ASSERT_EQ(alone.wait(), 0) << alone.error();
  const std::vector<double> losses = validation_losses(alone.output());
  ASSERT_THAT(losses, SizeIs(10)) << alone.output();
  EXPECT_LT(losses.back(), losses.front() / 5);

  Launched both = run_ranks(2, FORECAST_SERIES, {kConfig, two});
  ASSERT_EQ(both.wait(), 0) << both.error();
  const std::vector<double> shared = validation_losses(both.output());
  ASSERT_THAT(shared, SizeIs(10)) << both.output();
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(shared[i], losses[i], 1e-4) << i;

  // From the seventh epoch on, on another number of ranks.
  for (const char* later : {"epoch-8", "epoch-9", "epoch-10"})
    std::filesystem::remove_all(std::filesystem::path(two) / later);
  std::ofstream(std::filesystem::path(two) / "latest") << "epoch-7\n";
  Launched again = run_ranks(1, FORECAST_SERIES, {kConfig, two});
  ASSERT_EQ(again.wait(), 0) << again.error();
  const std::vector<double> rest = validation_losses(again.output());
  ASSERT_THAT(rest, SizeIs(3)) << again.output();
  EXPECT_NEAR(rest.back(), losses.back(), 1e-4);
}

TEST(ForecastSeries, TellsHowItIsCalled) {
  Launched bare({FORECAST_SERIES}, kOneThread);
  EXPECT_EQ(bare.wait(), 2);
  EXPECT_THAT(bare.error(), HasSubstr("usage: forecast_series CONFIG CHECKPOINTS"));
}

}  // namespace
}  // namespace lockstep::examples
