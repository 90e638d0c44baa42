// How a run behaves when its job is formed anew.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/net/secret.h>
#include <lockstep/train/distributed_trainer.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_start.h>
#include <lockstep/train/trainer.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "../base/variables.h"
#include "line.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;

// From now on this process's environment says that it is the only rank of a job of that name.
void be_of(Variables& variables, int generation, const std::string& name = "job") {
  variables.set("RANK", "0");
  variables.set("WORLD_SIZE", "1");
  variables.set("TORCHELASTIC_RUN_ID", name);
  variables.set("LOCKSTEP_GENERATION", std::to_string(generation));
}

TrainerOptions saving_each_step(const fs::path& output, int max_steps) {
  return {.max_steps = max_steps,
          .batch_size = 4,
          .optimizer = optim::SGDOptions{},
          .output = output,
          .checkpoint_interval = 1,
          .asynchronous_checkpoints = false,
          .tensorboard = false,
          .progress_fd = -1};
}

// The process was stopped in its fourth step, and wakes up.
TEST(Generations, OneThatIsOverSavesAndReportsNothing) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  Variables variables;
  be_of(variables, 0);
  int num_losses = 0;
  std::optional<FolderLock> later;
  std::string metrics;
  DistributedTrainer trainer(
      dist, Net(),
      [&](const at::Tensor& output, const at::Tensor& target) {
        if (++num_losses == 4) {
          metrics = read_file(folder / "metrics.csv");
          later.emplace(folder.path(), FolderHolder{.job = net::job_identity(), .generation = 1});
        }
        return kMean(output, target);
      },
      saving_each_step(folder.path(), 8));
  try {
    trainer.fit(Line(40));
    ADD_FAILURE() << "it went on";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("generation 1")) << "as of any generation that is over";
  }
  EXPECT_EQ(num_losses, 4);
  EXPECT_EQ(read_file(folder / "metrics.csv"), metrics);
  EXPECT_EQ(checkpoint::newest_checkpoint(folder / "checkpoints")->step, 3);
}

// Its generation is over when the trainer asks for the state to save, for the given time.
class OverWhenItSaves : public train::ModelTask<Net> {
 public:
  OverWhenItSaves(fs::path folder, int which)
      : ModelTask(Net(), kMean, LossReduction::mean), folder_(std::move(folder)), which_(which) {}

  std::map<std::string, std::string> checkpoint_files() const override {
    if (++num_asked_ == which_)
      later_.emplace(folder_, FolderHolder{.job = net::job_identity(), .generation = 1});
    return {};
  }

 private:
  fs::path folder_;
  int which_;
  mutable int num_asked_ = 0;
  mutable std::optional<FolderLock> later_;
};

// A last checkpoint that cannot be written is no reason to end the job.
TEST(Generations, OneThatIsOverWhenItIsDoneIsLostAsAnyOther) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  Variables variables;
  be_of(variables, 0);
  TrainerOptions options = saving_each_step(folder.path(), 2);
  options.checkpoint_interval = 0;
  // Reasons why the run could not be saved are found before it begins.
  const auto task = std::make_shared<OverWhenItSaves>(folder.path(), 2);
  train::Trainer trainer(dist, task, options);
  EXPECT_THAT(comm_error([&] { trainer.fit(data::from_torch(Line(40)), nullptr); }).second,
              HasSubstr("generation 1"));
  EXPECT_FALSE(checkpoint::newest_checkpoint(folder / "checkpoints"));
}

TEST(Generations, ALaterOneTakesTheFolderFromOneThatHangs) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  Variables variables;
  be_of(variables, 1);
  const FolderLock hangs(folder.path(), FolderHolder{.job = net::job_identity(), .generation = 0});
  EXPECT_EQ(
      DistributedTrainer(dist, Net(), kMean, saving_each_step(folder.path(), 2)).fit(Line(40)).step,
      2);
  EXPECT_THROW(hangs.check(), CommError);
}

TEST(Generations, AnotherJobDoesNot) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  Variables variables;
  be_of(variables, 1);
  const FolderLock hangs(folder.path(), FolderHolder{.job = net::job_identity(), .generation = 0});
  Variables others;
  be_of(others, 1, "another");
  DistributedTrainer trainer(dist, Net(), kMean, saving_each_step(folder.path(), 2));
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(40)); }), HasSubstr("another run"));
}

// Trains three steps more in a new generation, and returns the step from which it went on.
std::int64_t steps_before(const DistributedManager& dist, int generation, TrainerOptions options) {
  Variables variables;
  be_of(variables, generation);
  const auto newest = checkpoint::newest_checkpoint(options.output / "checkpoints");
  options.max_steps = (newest ? newest->step : 0) + 3;
  return DistributedTrainer(dist, Net(), kMean, options).fit(Line(40)).resumed_after;
}

TEST(Generations, ALaterOneGoesOnWithARunThatWasToStartAnew) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  TrainerOptions options = saving_each_step(folder.path(), 0);
  options.resume = train::Resume::never;
  EXPECT_EQ(steps_before(dist, 1, options), 0) << "the first was lost before it saved";
  EXPECT_EQ(steps_before(dist, 2, options), 3);
  EXPECT_THAT(usage_error([&] { steps_before(dist, 0, options); }), HasSubstr("up to step 6"));
}

TEST(Generations, ALaterOneGoesOnWithARunThatBeganFromAnothersCheckpoint) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  steps_before(dist, 0, saving_each_step(folder / "before", 0));
  TrainerOptions options = saving_each_step(folder / "run", 0);
  options.resume = train::Resume::from;
  options.resume_from = checkpoint::newest_checkpoint(folder / "before" / "checkpoints")->path;
  Variables variables;
  const auto from = [&](int generation, int max_steps) {
    be_of(variables, generation);
    options.max_steps = max_steps;
    return DistributedTrainer(dist, Net(), kMean, options).fit(Line(40)).resumed_after;
  };
  EXPECT_EQ(from(1, 5), 3) << "the first was lost before it saved";
  EXPECT_EQ(from(2, 8), 5) << "its own newest";
  for (const int generation : {0, 1}) {
    be_of(variables, generation, "another");
    EXPECT_THAT(usage_error([&] { DistributedTrainer(dist, Net(), kMean, options).fit(Line(40)); }),
                HasSubstr("would begin at step 3, and"))
        << "what is there would be taken for its own";
  }
}

// Either no earlier generation of the job got as far as to look into the folder; or one did, and
// the program was started anew after the error.
TEST(Generations, OthersCheckpointsAreNotTakenForOnesOfTheJob) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  TrainerOptions options = saving_each_step(folder.path(), 3);
  options.keep_checkpoints = 0;
  DistributedTrainer(dist, Net(), kMean, options).fit(Line(40));
  options.max_steps = 4;
  TrainerOptions from_nothing = options;
  from_nothing.resume = train::Resume::never;
  TrainerOptions from_the_first = options;
  from_the_first.resume = train::Resume::from;
  from_the_first.resume_from = folder / "checkpoints" / checkpoint::checkpoint_name(1);
  const auto refused = [&](int generation, const TrainerOptions& told) {
    Variables variables;
    be_of(variables, generation);
    return usage_error([&] { DistributedTrainer(dist, Net(), kMean, told).fit(Line(40)); });
  };
  for (const int generation : {1, 0, 1, 2}) {
    EXPECT_THAT(refused(generation, from_nothing), HasSubstr("would begin at step 0"));
    EXPECT_THAT(refused(generation, from_the_first), HasSubstr("would begin at step 1"));
  }
  EXPECT_EQ(checkpoint::list_checkpoints(folder / "checkpoints").size(), 3u);
}

// The checkpoint was the run's own, and the oldest of those that are kept.
TEST(Generations, ALaterOneGoesOnWhereTheCheckpointThatItsRunBeganFromIsGone) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  TrainerOptions options = saving_each_step(folder.path(), 0);
  EXPECT_EQ(steps_before(dist, 0, options), 0);
  options.resume = train::Resume::from;
  options.resume_from = checkpoint::newest_checkpoint(folder / "checkpoints")->path;
  EXPECT_EQ(steps_before(dist, 0, options), 3);
  EXPECT_FALSE(fs::exists(options.resume_from));
  EXPECT_EQ(steps_before(dist, 1, options), 6);
  EXPECT_EQ(steps_before(dist, 2, options), 9);
}

// By its folder, the run began on two ranks with this batch.
TEST(Generations, OnlyTheBatchOfTheSameJobIsKept) {
  const DistributedManager dist = setup_distributed();
  Variables variables;
  const auto samples_of_a_step = [&](const std::string& job) {
    const TemporaryFolder folder;
    checkpoint::TrainingState state;
    train::put({.global = 8, .micro = 4, .num_ranks = 2, .of_a_rank = 4}, state.values);
    be_of(variables, 0, job);
    train::write_start(folder.path(), {.job = net::job_identity()}, state);
    be_of(variables, 1);
    const auto result =
        DistributedTrainer(dist, Net(), kMean, saving_each_step(folder.path(), 1)).fit(Line(40));
    return checkpoint::CheckpointReader(result.checkpoint).manifest().state.samples_seen;
  };
  EXPECT_EQ(samples_of_a_step("job"), 8);
  EXPECT_EQ(samples_of_a_step("another"), 4);
}

TEST(Generations, EveryBitOfHowTheRunBeganIsChecked) {
  const TemporaryFolder folder;
  const FolderHolder job{.job = "job", .generation = 1};
  checkpoint::TrainingState state;
  state.step = 40;
  state.last_loss = 2.5;
  train::put({.global = 8, .micro = 4, .num_ranks = 2, .of_a_rank = 4}, state.values);
  train::write_start(folder.path(), job, state);
  ASSERT_EQ(train::begun_before(folder.path(), job)->step, 40);
  const std::string whole = read_file(folder / "start.json");
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string flipped = whole;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
    write_file(folder / "start.json", flipped);
    EXPECT_THROW(train::begun_before(folder.path(), job), UsageError) << flipped;
  }
}

// Checkpoints from before the run began are older, so the run does not go on from them.
TEST(Generations, ALaterOneDoesNotFallBehindWhereItsRunBegan) {
  const TemporaryFolder folder;
  const DistributedManager dist = setup_distributed();
  steps_before(dist, 0, saving_each_step(folder / "before", 0));
  TrainerOptions options = saving_each_step(folder / "run", 0);
  options.max_steps = 2;
  DistributedTrainer(dist, Net(), kMean, options).fit(Line(40));
  options.resume = train::Resume::from;
  options.resume_from = checkpoint::newest_checkpoint(folder / "before" / "checkpoints")->path;
  options.keep_checkpoints = 0;
  Variables variables;
  const auto resumed_after = [&](int generation, int max_steps) {
    be_of(variables, generation);
    options.max_steps = max_steps;
    return DistributedTrainer(dist, Net(), kMean, options).fit(Line(40)).resumed_after;
  };
  EXPECT_EQ(resumed_after(1, 4), 3);
  // All checkpoints that the run itself has written are damaged.
  fs::remove(folder / "run/checkpoints" / checkpoint::checkpoint_name(4) /
             "shard-00000.safetensors");
  be_of(variables, 2);
  train::TrainConfig config;
  config.output = folder / "run";
  config.checkpoint.resume = train::Resume::from;
  config.checkpoint.resume_from = options.resume_from;
  EXPECT_EQ(train::checkpoint_to_resume(config, {.job = net::job_identity(), .generation = 2}),
            options.resume_from);
  EXPECT_EQ(resumed_after(2, 5), 3);
}

}  // namespace
}  // namespace lockstep
