// A user's own pipeline learns the same with one pipeline and with two side by side, and
// docs/parallel.md shows its code.
#include <cstdlib>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "one_thread.h"
#include "tests/base/files.h"

namespace lockstep::examples {
namespace {

std::vector<double> losses_of_pipeline(int num_ranks) {
  Launched job = run_ranks(num_ranks, TRAIN_PIPELINE);
  EXPECT_EQ(job.wait(), 0) << job.error();
  std::vector<double> found;
  for (const std::string& line : launch::testing::lines_of(job.output()))
    if (const auto at = line.find("loss "); at != std::string::npos)
      found.push_back(std::atof(line.c_str() + at + 5));
  return found;
}

TEST(TrainPipeline, LearnsTheSameWithOneAndWithTwo) {
  const std::vector<double> one = losses_of_pipeline(2), two = losses_of_pipeline(4);
  ASSERT_EQ(one.size(), 10u);
  ASSERT_EQ(two.size(), 10u);
  EXPECT_LT(one.back(), one.front() / 5);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(two[i], one[i], 1e-5) << i;
}

TEST(TrainPipeline, IsWhatTheDocsShow) {
  const std::string text = lockstep::testing::read_file(LOCKSTEP_EXAMPLES "/train_pipeline.cpp");
  const std::string mark = "// documented: pipeline\n";
  const auto begin = text.find(mark) + mark.size();
  const std::string program = text.substr(begin, text.find("// documented: end") - begin);
  const std::string docs = lockstep::testing::read_file(LOCKSTEP_DOCS "/parallel.md");
  EXPECT_NE(docs.find("\n" + program + "```\n"), std::string::npos) << "docs/parallel.md has not:\n"
                                                                    << program;
}

}  // namespace
}  // namespace lockstep::examples
