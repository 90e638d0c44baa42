// A run of a user's own program goes on with another number of ranks.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>

#include <lockstep/data/sampling/distributed_sampler.h>
#include <lockstep/observe/csv_file.h>

#include "../base/files.h"
#include "../launch/launched.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using launch::testing::Launched;

const fs::path kSizesProgram = fs::read_symlink("/proc/self/exe");

void train(const fs::path& output, int num_ranks, int max_steps) {
  Launched job = Launched::run({"--standalone", "--nproc-per-node", std::to_string(num_ranks),
                                kSizesProgram.string(), "--train", output.string(),
                                std::to_string(max_steps)});
  ASSERT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
}

// The samples that all ranks had, in rising order.
std::vector<std::int64_t> samples_of(const fs::path& output, int num_ranks) {
  std::vector<std::int64_t> samples;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::ifstream file(output /
                       ("samples-" + std::to_string(rank) + "-of-" + std::to_string(num_ranks)));
    EXPECT_TRUE(file) << rank;
    for (std::int64_t sample = 0; file >> sample;) samples.push_back(sample);
  }
  std::ranges::sort(samples);
  return samples;
}

// The samples at a range of the run's positions, across the ends of epochs.
std::vector<std::int64_t> samples_at(std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> samples;
  data::DistributedSampler order({.size = 100});
  for (std::int64_t position = begin; position < end; ++position) {
    order.set_epoch(position / 100);
    samples.push_back(order.index_at(position % 100));
  }
  std::ranges::sort(samples);
  return samples;
}

std::vector<double> losses_of(const fs::path& output) {
  const observe::CsvTable table(output / "metrics.csv");
  std::vector<double> losses;
  for (const auto& row : table.rows())
    losses.push_back(observe::CsvTable::value(row, table.column("loss").value()).value());
  return losses;
}

// Steps have 24 samples; an epoch of 100 has four of them and one of 4. On 3 ranks each has 8 of
// them; on 5 ranks each has four or five, in two passes.
TEST(TrainerSizes, EverySampleIsUsedOnceAndLossesStayTheSame) {
  const testing::TemporaryFolder folder;
  train(folder.path() / "whole", 4, 15);
  const fs::path output = folder.path() / "run";
  train(output, 4, 3);
  train(output, 3, 7);
  train(output, 5, 15);
  EXPECT_EQ(samples_of(output, 4), samples_at(0, 72));
  EXPECT_EQ(samples_of(output, 3), samples_at(72, 148));
  EXPECT_EQ(samples_of(output, 5), samples_at(148, 300));
  const auto losses = losses_of(output);
  const auto wanted = losses_of(folder.path() / "whole");
  ASSERT_EQ(wanted.size(), 15u);
  ASSERT_EQ(losses.size(), 15u);
  for (std::size_t step = 0; step < 15; ++step)
    EXPECT_NEAR(losses[step], wanted[step], 1e-5 * wanted[step]) << "step " << step + 1;
}

}  // namespace
}  // namespace lockstep
