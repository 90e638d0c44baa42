// A model of one's own learns under lockstep train, the same on one rank and on two.
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/observe/csv_file.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

using ::testing::SizeIs;

std::vector<double> losses_of_sums(const std::filesystem::path& output, int num_ranks) {
  Launched job({LOCKSTEP_PROGRAM, "train", LOCKSTEP_EXAMPLES "/predict_sums.json",
                "--nproc-per-node", std::to_string(num_ranks), "--set", "output=" + output.string(),
                "--set", "model.library=" PREDICT_SUMS, "--set", "device=cpu"},
               kOneThread);
  EXPECT_EQ(job.wait(), 0) << job.error();
  const observe::CsvTable table(output / "metrics.csv");
  std::vector<double> losses;
  for (const auto& row : table.rows())
    if (const auto loss = observe::CsvTable::value(row, table.column("validation_loss").value()))
      losses.push_back(*loss);
  return losses;
}

TEST(PredictSums, LearnsTheSameOnOneRankAndTwo) {
  const launch::testing::Folder folder;
  const std::vector<double> one = losses_of_sums(folder.path() / "one", 1);
  // 512 samples in steps of 32, six times, with a validation each 32 steps.
  ASSERT_THAT(one, SizeIs(3));
  EXPECT_LT(one.back(), one.front() / 5);
  const std::vector<double> two = losses_of_sums(folder.path() / "two", 2);
  ASSERT_THAT(two, SizeIs(3));
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i], one[i], 1e-5) << i;
}

}  // namespace
}  // namespace lockstep::examples
