// The files that a run leaves, and that its layout does not change the answer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/base/files.h"
#include "training.h"

namespace lockstep::train::testing {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using ::testing::HasSubstr;
using ::testing::StartsWith;

double unigram_entropy(const std::string& text) {
  std::map<char, double> counts;
  for (const char byte : text) ++counts[byte];
  double entropy = 0;
  for (const auto& [byte, n] : counts) {
    const double share = n / static_cast<double>(text.size());
    entropy -= share * std::log(share);
  }
  return entropy;
}

void expect_close(const std::map<int, double>& got, const std::map<int, double>& wanted,
                  double relative) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [step, loss] : wanted)
    EXPECT_NEAR(got.at(step), loss, relative * loss) << "step " << step;
}

// The text has 9.5 batches, so the last steps of epochs have fewer samples than the ranks could
// share evenly.
TEST(Layout, GptHasTheSameLossesInEach) {
  Training training;
  training.set("/model/dropout", 0.1);
  training.train(1, "one");
  const auto wanted = training.losses("one");
  ASSERT_EQ(wanted.size(), 12u);
  EXPECT_EQ(wanted.begin()->first, 1);
  training.train(2, "two");
  expect_close(training.losses("two"), wanted, 1e-4);
  training.set("/gradient_accumulation_steps", 4);
  training.train(1, "accumulated");
  expect_close(training.losses("accumulated"), wanted, 1e-4);
  training.train(2, "both");
  expect_close(training.losses("both"), wanted, 1e-4);

  // The comparison can fail: dropout matters, and so does the order of the data.
  training.set("/model/dropout", 0);
  training.train(1, "other");
  EXPECT_GT(std::abs(training.losses("other").at(8) - wanted.at(8)), 5e-4 * wanted.at(8));
}

TEST(Layout, LlamaHasTheSameLossesInEach) {
  Training training;
  training.set("/model/family", "llama").set("/model/num_kv_heads", 1).set("/model/dropout", 0.1);
  training.train(1, "one");
  training.set("/gradient_accumulation_steps", 2);
  training.train(2, "two");
  expect_close(training.losses("two"), training.losses("one"), 1e-4);
}

// 4 of 76 sequences are left, which would make two passes on two ranks: whole passes, but no whole
// step.
TEST(Layout, DropLastLeavesOutTheSameSamplesInEach) {
  Training training;
  training.config.erase("max_steps");
  training.set("/epochs", 2).set("/dataloader_drop_last", true);
  training.train(1, "one");
  const auto wanted = training.losses("one");
  ASSERT_EQ(wanted.size(), 18u);
  training.set("/gradient_accumulation_steps", 4);
  training.train(1, "accumulated");
  expect_close(training.losses("accumulated"), wanted, 1e-4);
  training.train(2, "both");
  expect_close(training.losses("both"), wanted, 1e-4);
}

class Learns : public ::testing::TestWithParam<int> {};

TEST_P(Learns, MoreThanHowOftenEachByteComes) {
  Training training(200, Training::Text::repeated);
  training.set("/max_steps", 80).set("/optimizer/params/lr", 2e-2).set("/validation/interval", 40);
  Launched run = training.start(GetParam());
  ASSERT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  const auto losses = training.losses();
  ASSERT_EQ(losses.size(), 80u);
  EXPECT_LT(losses.at(80), 0.8 * unigram_entropy(read_file(training.text())));
  EXPECT_THAT(run.output(), HasSubstr("step 80/80"));
  EXPECT_THAT(run.output(), HasSubstr(training.checkpoint().string()));
  EXPECT_EQ(count(run.output(), "done at step 80"), 1);

  EXPECT_EQ(training.checkpoint().filename(), "step-00000080");
  for (const char* file : {"shard-00000.safetensors", "config.json", "manifest.json"})
    EXPECT_TRUE(fs::exists(training.checkpoint() / file)) << file;
  EXPECT_THAT(read_file(training.output() / "loss.svg"), HasSubstr("<svg"));
  std::vector<fs::path> events;
  for (const auto& entry : fs::directory_iterator(training.output() / "tensorboard"))
    events.push_back(entry.path());
  ASSERT_EQ(events.size(), 1u);
  EXPECT_THAT(events[0].filename().string(), StartsWith("events.out.tfevents."));
  EXPECT_GT(fs::file_size(events[0]), 80u * 5 * 16);
}

INSTANTIATE_TEST_SUITE_P(Ranks, Learns, ::testing::Values(1, 2));

TEST(RunFolder, KeepsAConfigThatTheRunGoesOnWith) {
  Training training;
  training.train(1);
  const std::string kept = (training.output() / "config.json").string();
  const auto resolved = nlohmann::json::parse(read_file(kept));
  EXPECT_EQ(resolved.at("seed"), 1234);
  EXPECT_EQ(resolved.at("max_steps"), 12);

  const std::string metrics = read_file(training.output() / "metrics.csv");
  Launched again({LOCKSTEP_PROGRAM, "train", kept});
  EXPECT_EQ(again.wait(), 0) << again.error();
  EXPECT_THAT(again.error(), HasSubstr("all 12 steps were done before"));
  EXPECT_EQ(read_file(training.output() / "metrics.csv"), metrics) << "nothing was trained";

  Launched more({LOCKSTEP_PROGRAM, "train", kept, "--set", "max_steps=14"});
  EXPECT_EQ(more.wait(), 0) << more.error();
  EXPECT_EQ(training.losses().size(), 14u);
}

}  // namespace
}  // namespace lockstep::train::testing
