// What a run counts, saves and finds again.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/manifest.h>
#include <lockstep/train/distributed_trainer.h>

#include "../base/files.h"
#include "../checkpoint/tiny_disk.h"
#include "line.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::TinyDisk;
using lockstep::testing::write_file;

TrainerOptions three_steps(const fs::path& output) {
  return {.max_steps = 3,
          .batch_size = 4,
          .accumulation = 2,
          .shuffle = false,
          .optimizer = optim::SGDOptions{},
          .learning_rate = 0.1,
          .output = output,
          .csv = false,
          .tensorboard = false,
          .progress_fd = -1};
}

// Samples 8 to 15, all of the second step, count for nothing.
nn::LossSum ignoring(const at::Tensor& output, const at::Tensor& target) {
  const at::Tensor counts = target.lt(3 * 0.75 - 2).logical_or(target.gt(3 * 1.55 - 2));
  return {.sum = (squares(output, target) * counts).sum(),
          .count = counts.sum().item<std::int64_t>()};
}

checkpoint::TrainingState saved(const TrainingResult& result) {
  return checkpoint::read_manifest(result.checkpoint).state;
}

TEST(Checkpoints, AStepWithNothingToLearnFromIsSkippedAndKeptCountOf) {
  const TemporaryFolder folder;
  TrainerOptions two = three_steps(folder.path());
  two.max_steps = 1;
  Net net;
  const auto weight = [&] { return net->layer->weight.detach().clone(); };
  const TrainingResult first =
      DistributedTrainer(setup_distributed(), net, ignoring, two).fit(Line(20));
  EXPECT_EQ(first.skipped_steps, 0);
  EXPECT_EQ(saved(first).samples_seen, 8);
  const at::Tensor before = weight();

  two.max_steps = 2;
  const TrainingResult second =
      DistributedTrainer(setup_distributed(), net, ignoring, two).fit(Line(20));
  EXPECT_EQ(second.step, 2);
  EXPECT_EQ(second.skipped_steps, 1);
  EXPECT_EQ(second.loss, first.loss) << "the last that there was";
  EXPECT_TRUE(at::equal(weight(), before));

  const TrainingResult third =
      DistributedTrainer(setup_distributed(), net, ignoring, three_steps(folder.path()))
          .fit(Line(20));
  EXPECT_EQ(third.resumed_after, 2);
  EXPECT_EQ(third.skipped_steps, 1) << "before it was resumed";
  EXPECT_FALSE(at::equal(weight(), before));
  EXPECT_EQ(saved(third).samples_seen, 20) << "the last step has the 4 that are left";
}

TEST(Checkpoints, ValidationWithNothingThatCounts) {
  DistributedTrainer trainer(
      setup_distributed(), Net(),
      [validates = false](const at::Tensor& output, const at::Tensor& target) mutable {
        validates = !at::GradMode::is_enabled();
        return nn::LossSum{.sum = squares(output, target).sum() * (validates ? 0 : 1),
                           .count = validates ? 0 : output.size(0)};
      },
      three_steps(""));
  EXPECT_FALSE(trainer.fit(Line(20), Line(5)).validation_loss) << "and not a NaN";
}

// A checkpoint of step 0 that cannot be removed: something is mounted in it.
TEST(Checkpoints, AnOldOneThatCannotBeRemovedCostsNothing) {
  const TinyDisk disk("4m");
  if (!disk.mounted()) GTEST_SKIP() << "only root can mount something";
  const fs::path old = disk / "run/checkpoints/step-00000000";
  fs::create_directories(old / "held");
  write_file(old / checkpoint::kManifestFile, "");
  ASSERT_EQ(::mount("tmpfs", (old / "held").c_str(), "tmpfs", 0, "size=4k"), 0);
  TrainerOptions one = three_steps(disk / "run");
  one.resume = train::ResumePolicy::never;
  one.keep_checkpoints = 1;
  one.checkpoint_interval = 1;
  const TrainingResult result =
      DistributedTrainer(setup_distributed(), Net(), kMean, one).fit(Line(20));
  EXPECT_EQ(result.checkpoint, disk / "run/checkpoints/step-00000003");
  EXPECT_EQ(saved(result).step, 3);
  EXPECT_EQ(checkpoint::list_checkpoints(disk / "run/checkpoints").size(), 1u)
      << "what is left of it is no checkpoint";
}

}  // namespace
}  // namespace lockstep
