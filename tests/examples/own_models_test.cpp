// Programs that look like their users': two models, batches of uneven sizes, a GPT. Each learns,
// and learns the same on one rank and on two.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

using ::testing::AllOf;
using ::testing::Gt;
using ::testing::Lt;
using ::testing::SizeIs;

constexpr std::uintmax_t kGptWeights = 85'872;

// The number behind a word in each line that begins with "step ".
std::vector<double> numbers_after(const std::string& word, const std::string& output) {
  std::vector<double> found;
  for (const std::string& line : launch::testing::lines_of(output))
    if (const auto at = line.find("step "); at != std::string::npos)
      if (const auto number = line.find(word, at); number != std::string::npos)
        found.push_back(std::atof(line.c_str() + number + word.size()));
  return found;
}

std::string output_of(int num_ranks, const std::string& program,
                      const std::vector<std::string>& flags = {}) {
  Launched job = run_ranks(num_ranks, program, flags);
  EXPECT_EQ(job.wait(), 0) << job.error();
  return job.output();
}

void expect_same(const std::vector<double>& one, const std::vector<double>& two, double within) {
  ASSERT_EQ(one.size(), two.size());
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], two[i], within) << i;
}

TEST(OwnModels, AGeneratorAndItsCriticLearnTogether) {
  const std::string alone = output_of(1, TRAIN_GAN), both = output_of(2, TRAIN_GAN);
  const auto distance = numbers_after("ring ", alone);
  ASSERT_THAT(distance, SizeIs(10)) << alone;
  EXPECT_LT(distance.back(), 0.25);
  EXPECT_GT(distance.front(), 2 * distance.back());
  expect_same(distance, numbers_after("ring ", both), 1e-3);
}

TEST(OwnModels, CloudsOfUnevenSizesAreLabelled) {
  const std::string alone = output_of(1, SEGMENT_POINTS), both = output_of(2, SEGMENT_POINTS);
  const auto right = numbers_after("right ", alone);
  ASSERT_THAT(right, SizeIs(10)) << alone;
  EXPECT_GT(right.back(), 95) << alone;
  expect_same(numbers_after("loss ", alone), numbers_after("loss ", both), 1e-4);
}

TEST(OwnModels, AGptLearnsToAdd) {
  const launch::testing::Folder folder;
  const std::string weights = folder.path() / "gpt.safetensors";
  const std::string alone = output_of(1, TRAIN_PLAIN_GPT);
  const std::string both = output_of(2, TRAIN_PLAIN_GPT, {weights});
  const auto losses = numbers_after("loss ", alone), shared = numbers_after("loss ", both);
  ASSERT_THAT(losses, SizeIs(6)) << alone;
  ASSERT_THAT(shared, SizeIs(6)) << both;
  EXPECT_LT(losses.back(), losses.front() / 2);
  EXPECT_LT(shared.back(), losses.front() / 2);
  // Later on each step magnifies rounding.
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(losses[i], shared[i], 1e-4) << i;
  // All of the weights in float32, and the header before them.
  const auto bytes = std::filesystem::file_size(weights);
  EXPECT_THAT(bytes, AllOf(Gt(kGptWeights * 4), Lt(kGptWeights * 4 + 8192)));
}

}  // namespace
}  // namespace lockstep::examples
