// Configurations that cannot work are refused before anything is computed.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/folder_lock.h>
#include <lockstep/train/distributed_trainer.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "line.h"

namespace lockstep {
namespace {

using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;

TrainerOptions four_steps(const std::filesystem::path& output) {
  return {.max_steps = 4,
          .batch_size = 7,
          .optimizer = optim::SGDOptions{},
          .output = output,
          .progress_fd = -1};
}

// Counts how often the loss was computed.
template <typename Model = Net>
struct Trial {
  explicit Trial(TrainerOptions options, Model model = Model())
      : trainer(
            setup_distributed(), std::move(model),
            [this](const at::Tensor& output, const at::Tensor& target) {
              ++num_losses;
              return kMean(output, target);
            },
            std::move(options)) {}
  TrainingResult run() { return trainer.fit(Line(20)); }

  int num_losses = 0;
  DistributedTrainer<Model> trainer;
};

TEST(BeforeTheFirstStep, EveryNumberOfTheOptions) {
  const auto complaint = [](auto change) {
    TrainerOptions changed = four_steps("");
    change(changed);
    Trial trial(changed);
    const std::string text = usage_error([&] { trial.run(); });
    EXPECT_EQ(trial.num_losses, 0) << text;
    return text;
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  using Options = TrainerOptions;
  EXPECT_THAT(complaint([](Options& o) { o.max_steps = 0; }), HasSubstr("max_steps is 0"));
  EXPECT_THAT(complaint([](Options& o) { o.epochs = -1; }), HasSubstr("epochs is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.max_steps.reset(); }), HasSubstr("how long"));
  EXPECT_THAT(complaint([](Options& o) { o.batch_size = 0; }), HasSubstr("batch_size is 0"));
  EXPECT_THAT(complaint([](Options& o) { o.accumulation = 0; }), HasSubstr("accumulation is 0"));
  EXPECT_THAT(complaint([](Options& o) { o.accumulation = kMost; }), HasSubstr("counted"));
  EXPECT_THAT(complaint([](Options& o) { o.samples_per_step = 0; }),
              HasSubstr("samples_per_step is 0"));
  EXPECT_THAT(complaint([](Options& o) {
                o.samples_per_step = 64;
                o.accumulation = 2;
              }),
              HasSubstr("samples_per_step is 64 and accumulation 2: leave one of them out"));
  EXPECT_THAT(complaint([](Options& o) {
                o.samples_per_step = 64;
                o.learning_rate_scaling = train::LearningRateScaling::linear;
              }),
              HasSubstr("leave learning_rate_scaling out"));
  EXPECT_THAT(complaint([](Options& o) { o.num_workers = -1; }), HasSubstr("num_workers is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.prefetch = 0; }), HasSubstr("prefetch is 0"));
  EXPECT_THAT(complaint([](Options& o) { o.learning_rate = kNan; }), HasSubstr("learning_rate"));
  EXPECT_THAT(complaint([](Options& o) { o.learning_rate = -1; }),
              HasSubstr("learning_rate is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.weight_decay = -1; }), HasSubstr("weight_decay is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.gradient_clipping = kNan; }), HasSubstr("clipping"));
  EXPECT_THAT(complaint([](Options& o) { o.gradient_clipping = -1; }), HasSubstr("clipping is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.validation_interval = -1; }),
              HasSubstr("interval is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.validation_batches = -1; }), HasSubstr("batches is -1"));
  EXPECT_THAT(complaint([](Options& o) {
                o.validation_batches = kMost;
                o.accumulation = 2;
              }),
              HasSubstr("more than can be counted"));
  EXPECT_THAT(complaint([](Options& o) { o.checkpoint_interval = -5; }),
              HasSubstr("checkpoint_interval is -5"));
  EXPECT_THAT(complaint([](Options& o) { o.keep_checkpoints = -1; }),
              HasSubstr("keep_checkpoints is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.steps_per_print = -1; }), HasSubstr("print is -1"));
  EXPECT_THAT(complaint([](Options& o) { o.progress_fd = -2; }), HasSubstr("progress_fd is -2"));
  EXPECT_THAT(complaint([](Options& o) { o.reference_loss = {.label = "x", .value = kNan}; }),
              HasSubstr("reference_loss"));
}

TEST(BeforeTheFirstStep, AFolderThatCannotBe) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  Trial trial(four_steps(folder / "file"));
  EXPECT_THROW(trial.run(), FileError);
  EXPECT_EQ(trial.num_losses, 0);
  if (::geteuid() == 0) return;
  std::filesystem::permissions(
      folder.path(), std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  Trial locked(four_steps(folder.path()));
  EXPECT_THROW(locked.run(), FileError);
  EXPECT_EQ(locked.num_losses, 0);
  std::filesystem::permissions(folder.path(), std::filesystem::perms::owner_all);
}

TEST(BeforeTheFirstStep, AFolderThatAnotherRunIsIn) {
  const TemporaryFolder folder;
  Trial trial(four_steps(folder.path()));
  {
    const FolderLock other(folder.path());
    EXPECT_THAT(usage_error([&] { trial.run(); }), HasSubstr("another run writes into"));
    EXPECT_EQ(trial.num_losses, 0);
  }
  EXPECT_EQ(trial.run().step, 4);
  EXPECT_NO_THROW(FolderLock(folder.path())) << "the run has let go";
}

// Has no elements, so no rank has to send them.
struct Complex : NetImpl {
  Complex() { register_buffer("roots", at::empty({0}, at::kComplexDouble)); }
};

TEST(BeforeTheFirstStep, ATensorThatNoCheckpointCanHold) {
  const TemporaryFolder folder;
  Trial trial(four_steps(folder.path()), std::make_shared<Complex>());
  EXPECT_THAT(usage_error([&] { trial.run(); }), HasSubstr("'model/roots' cannot be saved"));
  EXPECT_EQ(trial.num_losses, 0);
  Trial unsaved(four_steps(""), std::make_shared<Complex>());
  EXPECT_EQ(unsaved.run().step, 4) << "who saves nothing may have it";
}

TEST(BeforeTheFirstStep, ATextThatNoCheckpointCanHold) {
  const TemporaryFolder folder;
  TrainerOptions strange = four_steps(folder.path());
  strange.config = "\xff";
  Trial trial(strange);
  EXPECT_THAT(usage_error([&] { trial.run(); }), HasSubstr("not UTF-8"));
  EXPECT_EQ(trial.num_losses, 0);
}

// A failure to write metrics never ends a run.
TEST(BeforeTheFirstStep, FoldersOfMetricsThatCannotBeCostTheMetrics) {
  const TemporaryFolder folder;
  write_file(folder / "file", "");
  TrainerOptions blocked = four_steps(folder / "run");
  blocked.csv_folder = folder / "file/csv";
  blocked.tensorboard_folder = folder / "file/tensorboard";
  Trial trial(blocked);
  EXPECT_EQ(trial.run().step, 4);
}

}  // namespace
}  // namespace lockstep
