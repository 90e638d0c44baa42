// The counts that a run keeps, saves and restores.
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/net/secret.h>
#include <lockstep/train/distributed_trainer.h>
#include <lockstep/train/preflight/run_start.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "../base/variables.h"
#include "../checkpoint/tiny_disk.h"
#include "line.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::TinyDisk;
using lockstep::testing::write_file;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

// Samples 8 to 15, which are all of the second step's, do not count.
nn::LossSum ignoring(const at::Tensor& output, const at::Tensor& target) {
  const at::Tensor counts = target.lt(3 * 0.75 - 2).logical_or(target.gt(3 * 1.55 - 2));
  return {.sum = (squares(output, target) * counts).sum(),
          .count = counts.sum().item<std::int64_t>()};
}

checkpoint::TrainingState saved(const TrainingResult& result) {
  return checkpoint::CheckpointReader(result.checkpoint).manifest().state;
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

// This holds whoever starts the run again, and whatever has happened to its checkpoints in the
// meantime.
TEST(Checkpoints, ARunThatHasSavedIsNotBegunAnewInItsFolder) {
  const TemporaryFolder folder;
  TrainerOptions options = three_steps(folder / "run");
  options.checkpoint_interval = 1;
  options.asynchronous_checkpoints = false;
  const fs::path checkpoints = folder / "run/checkpoints";
  const DistributedManager dist = setup_distributed();
  const auto train = [&] { return DistributedTrainer(dist, Net(), kMean, options).fit(Line(40)); };
  train();
  fs::copy(checkpoints, folder / "kept", fs::copy_options::recursive);
  const auto all = checkpoint::list_checkpoints(checkpoints);
  ASSERT_GE(all.size(), 2u);
  options.max_steps = 4;
  for (const auto& one : all) fs::resize_file(one.path / "shard-00000.safetensors", 100);
  for (const char* attempt : {"first", "requeued"}) {
    try {
      train();
      ADD_FAILURE() << attempt;
    } catch (const train::TrainingStopped& stopped) {
      EXPECT_THAT(stopped.what(), AllOf(HasSubstr("step-00000003/shard-00000.safetensors"),
                                        HasSubstr("nothing to go on from")))
          << attempt;
    }
    EXPECT_EQ(checkpoint::list_checkpoints(checkpoints), all) << attempt;
  }
  const auto refused = [&](const std::string& part) {
    for (const auto policy : {train::Resume::automatic, train::Resume::never}) {
      options.resume = policy;
      EXPECT_THAT(usage_error(train),
                  AllOf(HasSubstr("of a run was saved in"), HasSubstr(part), HasSubstr("folder")));
    }
    options.resume = train::Resume::automatic;
  };
  // A run that had an older checkpoint set them aside.
  for (const auto& one : all) checkpoint::set_aside(one);
  refused("'damaged-step-00000003' was set aside");
  fs::remove(folder / "run/saved.json");
  refused("'damaged-step-00000003' was set aside");
  // The checkpoints were moved away, or are on a disk that is not mounted.
  write_file(folder / "run/saved.json", R"({"step": 1})");
  fs::remove_all(checkpoints);
  refused("step 1 of a run");
  // The same holds for another generation of the job that has begun the run.
  {
    Variables variables;
    for (const auto& [name, value] : {std::pair("RANK", "0"), std::pair("WORLD_SIZE", "1"),
                                      std::pair("TORCHELASTIC_RUN_ID", "job")})
      variables.set(name, value);
    variables.set("LOCKSTEP_GENERATION", "1");
    train::write_start(options.output, {.job = net::job_identity()}, {});
    refused("step 1 of a run");
  }
  // The way out is a copy of a checkpoint, or another folder.
  fs::remove_all(checkpoints);
  fs::copy(folder / "kept", checkpoints, fs::copy_options::recursive);
  EXPECT_EQ(train().resumed_after, 3);
  options.output = folder / "new";
  EXPECT_EQ(train().resumed_after, 0);
}

TEST(Checkpoints, OneThatLostItsManifestIsNamedAndTheOneBeforeIsUsed) {
  const TemporaryFolder folder;
  TrainerOptions options = three_steps(folder.path());
  options.checkpoint_interval = 1;
  options.asynchronous_checkpoints = false;
  const auto train = [&] {
    return DistributedTrainer(setup_distributed(), Net(), kMean, options).fit(Line(40));
  };
  train();
  fs::remove(folder / "checkpoints/step-00000003/manifest.json");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(train().resumed_after, 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("step-00000003' has lost its manifest.json"),
                    HasSubstr("damaged-step-00000003"), HasSubstr("the one before is used")));
  EXPECT_TRUE(fs::exists(folder / "checkpoints/damaged-step-00000003"));
  EXPECT_TRUE(fs::exists(folder / "checkpoints/step-00000003/manifest.json")) << "saved anew";
}

TEST(Checkpoints, ANewestOneThatIsGoneIsNamed) {
  const TemporaryFolder folder;
  TrainerOptions options = three_steps(folder.path());
  options.checkpoint_interval = 1;
  options.keep_checkpoints = 3;
  options.asynchronous_checkpoints = false;
  const auto train = [&](std::int64_t resumed_after) {
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(
        DistributedTrainer(setup_distributed(), Net(), kMean, options).fit(Line(40)).resumed_after,
        resumed_after);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_THAT(train(0), Not(HasSubstr("is gone")));
  fs::remove_all(folder / "checkpoints/step-00000003");
  EXPECT_THAT(train(2), AllOf(HasSubstr("a checkpoint of step 3 was saved in"),
                              HasSubstr("is gone"), HasSubstr("goes on from step 2")));
  // A newer checkpoint has been saved by then.
  EXPECT_THAT(train(3), Not(HasSubstr("is gone")));
  fs::remove_all(folder / "checkpoints/step-00000003");
  fs::remove_all(folder / "checkpoints/step-00000002");
  options.max_steps = 2;
  EXPECT_THAT(train(1), HasSubstr("a checkpoint of step 3 was saved in"));
  EXPECT_THAT(train(2), Not(HasSubstr("is gone"))) << "the run's newest is that of step 2 now";
  write_file(folder / "saved.json", "{");
  EXPECT_THAT(train(2), AllOf(HasSubstr("saved.json"), HasSubstr("is not known")));
}

// The error about newer checkpoints gives this advice.
TEST(Checkpoints, ARunGoesBackWhereTheLaterOnesWereRemoved) {
  const TemporaryFolder folder;
  TrainerOptions options = three_steps(folder.path());
  options.checkpoint_interval = 1;
  options.keep_checkpoints = 3;
  options.asynchronous_checkpoints = false;
  const auto train = [&] {
    return DistributedTrainer(setup_distributed(), Net(), kMean, options).fit(Line(40));
  };
  train();
  options.resume = train::Resume::from;
  options.resume_from = folder / "checkpoints/step-00000001";
  EXPECT_THAT(usage_error(train), HasSubstr("remove those"));
  fs::remove_all(folder / "checkpoints/step-00000003");
  fs::remove_all(folder / "checkpoints/step-00000002");
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(train().resumed_after, 1);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("a checkpoint of step 3 was saved in"), HasSubstr("is gone")));
}

// The checkpoint of step 0 cannot be removed, because something is mounted in it.
TEST(Checkpoints, AnOldOneThatCannotBeRemovedCostsNothing) {
  const TinyDisk disk("4m");
  if (!disk.mounted()) GTEST_SKIP() << "only root can mount something";
  const fs::path old = disk / "run/checkpoints/step-00000000";
  fs::create_directories(old / "held");
  write_file(old / checkpoint::kManifestFile, "");
  ASSERT_EQ(::mount("tmpfs", (old / "held").c_str(), "tmpfs", 0, "size=4k"), 0);
  TrainerOptions one = three_steps(disk / "run");
  one.resume = train::Resume::never;
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
