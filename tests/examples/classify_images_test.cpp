// A convolutional net with batch norms learns to read, in the same way on one rank and on two.
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

using launch::testing::Folder;
using ::testing::HasSubstr;

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

// The second column of metrics.csv, by step.
std::map<int, double> losses_by_step(const std::string& metrics) {
  std::map<int, double> found;
  for (const std::string& line : launch::testing::lines_of(metrics)) {
    const auto comma = line.find(',');
    if (line[0] == 's' || line[comma + 1] == ',') continue;  // the header, a validation
    found[std::atoi(line.c_str())] = std::atof(line.c_str() + comma + 1);
  }
  return found;
}

// The accuracy in the last line that has it.
double accuracy(const std::string& output) {
  const auto at = output.rfind("accuracy ");
  return at == std::string::npos ? -1 : std::atof(output.c_str() + at + 9);
}

TEST(ClassifyImages, OneRankAndTwoLearnTheSame) {
  const Folder folder;
  std::map<int, std::map<int, double>> by_ranks;
  for (const int num_ranks : {1, 2}) {
    const auto output = folder.path() / std::to_string(num_ranks);
    Launched job = run_ranks(num_ranks, CLASSIFY_IMAGES, {"--output", output, "--epochs", "2"});
    ASSERT_EQ(job.wait(), 0) << job.error();
    EXPECT_GT(accuracy(job.output()), 90) << job.output();
    EXPECT_TRUE(std::filesystem::exists(output / "loss.svg"));
    EXPECT_TRUE(std::filesystem::exists(output / "checkpoints/step-00000128/manifest.json"));
    by_ranks[num_ranks] = losses_by_step(text_of(output / "metrics.csv"));
  }
  ASSERT_EQ(by_ranks[1].size(), 128u);
  EXPECT_LT(by_ranks[1][128], by_ranks[1][1] / 5);
  ASSERT_EQ(by_ranks[2].size(), 128u);
  for (const auto& [step, loss] : by_ranks[1])
    EXPECT_NEAR(by_ranks[2][step], loss, 1e-4) << "step " << step;

  // A second run into the same folder says that it is done, and changes nothing.
  const auto output = folder.path() / "2";
  const std::string metrics = text_of(output / "metrics.csv");
  Launched again = run_ranks(2, CLASSIFY_IMAGES, {"--output", output, "--epochs", "2"});
  ASSERT_EQ(again.wait(), 0) << again.error();
  EXPECT_THAT(again.output(), HasSubstr("nothing was left to train"));
  EXPECT_GT(accuracy(again.output()), 90) << again.output();
  EXPECT_EQ(text_of(output / "metrics.csv"), metrics);
}

TEST(ClassifyImages, InterruptedItGoesOnWhereItWas) {
  const Folder folder;
  const std::string output = folder.path();
  Launched job = run_ranks(2, CLASSIFY_IMAGES, {"--output", output, "--epochs", "50"});
  ASSERT_TRUE(job.says("step 20/")) << job.error();
  job.kill(SIGINT);
  ASSERT_NE(job.wait(), -1);
  const std::string said = job.output();
  const auto at = said.find("interrupted after step ");
  ASSERT_NE(at, std::string::npos) << said << job.error();
  const int step = std::atoi(said.c_str() + at + 23);

  Launched again = run_ranks(1, CLASSIFY_IMAGES, {"--output", output, "--epochs", "50"});
  ASSERT_TRUE(again.says("step ")) << again.error();
  again.kill(SIGINT);
  ASSERT_NE(again.wait(), -1);
  EXPECT_THAT(again.error(), HasSubstr("goes on from step " + std::to_string(step)));
  EXPECT_THAT(again.output(), HasSubstr("step " + std::to_string(step + 1) + "/"));
}

TEST(ClassifyImages, SaysWhatIsWrongWithItsFlags) {
  const auto complaint = [](std::vector<std::string> words) {
    words.insert(words.begin(), CLASSIFY_IMAGES);
    Launched job(words, kOneThread);
    EXPECT_EQ(job.wait(), 1);
    return job.error();
  };
  EXPECT_THAT(complaint({"--epoch", "3"}), HasSubstr("--epoch is none of --output, --epochs"));
  EXPECT_THAT(complaint({"--epochs", "3x"}), HasSubstr("--epochs is '3x'"));
}

TEST(ClassifyImages, TellsWhatItTakes) {
  Launched help({CLASSIFY_IMAGES, "--help"});
  EXPECT_EQ(help.wait(), 0) << help.error();
  for (const char* flag : {"--output", "--epochs", "--batch"})
    EXPECT_THAT(help.output(), HasSubstr(flag));
}

}  // namespace
}  // namespace lockstep::examples
