// A trainer's loop in the program's hands, and when a run ends by itself.
#include <lockstep/train/distributed_trainer.h>

#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/train/averaged_weights.h>
#include <tests/ranks/job.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "line.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

TrainerOptions options() {
  return {.epochs = 8,
          .batch_size = 7,
          .optimizer = optim::SGDOptions{},
          .learning_rate = 0.1,
          .progress_fd = -1};
}

// A metric whose values are given, one for each validation.
struct Given {
  std::vector<double> values;
  std::size_t next = 0;

  void add_to(auto& trainer) {
    trainer.add_metric("score", [this](const at::Tensor&, const at::Tensor&) {
      return values.at(std::min(next, values.size() - 1));
    });
    trainer.on_validation([this](const Validation&) { ++next; });
  }
};

TEST(AveragedWeights, OfSixteenBitsMoveByLittle) {
  DistributedManager dist = setup_distributed();
  const auto model = std::make_shared<torch::nn::LinearImpl>(3, 2);
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(1);
  }
  model->to(at::kBFloat16);
  dist.wrap_model(model);
  train::AveragedWeights average(dist, model, /*decay=*/0.999);
  {
    const torch::NoGradGuard no_grad;
    model->weight.fill_(2);
  }
  for (int step = 0; step < 500; ++step) average.update(at::ones({}, at::kDouble));
  const double wanted = 2 - std::pow(0.999, 500);
  bool found = false;
  for (const mesh::HeldTensor& one : average.held())
    if (one.name == "average/weight") {
      found = true;
      EXPECT_NEAR(one.values.mean().item<double>(), wanted, 1e-4);
    }
  EXPECT_TRUE(found);
  average.in_place_of_weights(
      [&] { EXPECT_NEAR(model->weight.mean().item<double>(), wanted, 1e-2); });
  EXPECT_EQ(model->weight.mean().item<double>(), 2);
}

TEST(TrainerLoop, TellsCallbacksWhatHappens) {
  TrainerOptions two = options();
  two.epochs = 2;
  two.learning_rate = 0;
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, two);
  std::vector<std::int64_t> steps, epochs, validations;
  double epoch_loss = 0, validation_loss = 0;
  trainer.on_step([&](const StepEnd& step) { steps.push_back(step.step); })
      .on_epoch([&](const EpochEnd& epoch) {
        epochs.push_back(epoch.step);
        epoch_loss = epoch.loss;
      })
      .on_validation([&](const Validation& validation) {
        validations.push_back(validation.step);
        validation_loss = validation.loss;
      });
  trainer.fit(Line(20), Line(20));
  EXPECT_THAT(steps, ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_THAT(epochs, ElementsAre(3, 6));
  EXPECT_THAT(validations, ElementsAre(3, 6));
  // With a learning rate of 0, both are the mean over the same samples.
  EXPECT_NEAR(epoch_loss, validation_loss, 1e-5);
}

TEST(TrainerLoop, ACallbackStopsTheRunWithACheckpoint) {
  const TemporaryFolder folder;
  TrainerOptions saving = options();
  saving.output = folder.path();
  const auto dist = setup_distributed();
  {
    DistributedTrainer trainer(dist, Net(), kMean, saving);
    trainer.on_epoch(
        [](const EpochEnd& epoch) { return epoch.epoch == 2 ? Then::stop : Then::go_on; });
    const TrainingResult result = trainer.fit(Line(20));
    EXPECT_EQ(result.end, TrainingResult::End::stopped);
    EXPECT_EQ(result.step, 6);
    EXPECT_TRUE(checkpoint::newest_checkpoint(folder / "checkpoints"));
  }
  DistributedTrainer trainer(dist, Net(), kMean, saving);
  EXPECT_EQ(trainer.fit(Line(20)).resumed_after, 6);
}

TEST(TrainerLoop, StopsWhenValidationsNoLongerImprove) {
  const TemporaryFolder folder;
  TrainerOptions patient = options();
  patient.judge = {.metric = "score", .better = Judge::Better::larger, .min_delta = 0.1};
  patient.patience = 2;
  patient.keep_best = true;
  patient.output = folder.path();
  const auto dist = setup_distributed();
  // The fourth is better by less than min_delta; the third is no number.
  Given given{{0.5, 0.8, std::nan(""), 0.85, 2.0}};
  const auto fit = [&] {
    DistributedTrainer trainer(dist, Net(), kMean, patient);
    given.add_to(trainer);
    return trainer.fit(Line(20), Line(1));
  };
  const TrainingResult result = fit();
  EXPECT_EQ(result.end, TrainingResult::End::stopped);
  EXPECT_EQ(result.step, 12);
  ASSERT_TRUE(result.best);
  EXPECT_EQ(*result.best, 0.8);
  EXPECT_EQ(result.best_step, 6);
  EXPECT_EQ(result.best_checkpoint, folder / "best" / "step-00000006");
  EXPECT_EQ(checkpoint::list_checkpoints(folder / "best").size(), 1u);
  // A run that has ended so stays ended, and knows its best.
  const TrainingResult again = fit();
  EXPECT_EQ(again.end, TrainingResult::End::stopped);
  EXPECT_EQ(again.step, 12);
  EXPECT_EQ(again.best_checkpoint, result.best_checkpoint);
  DistributedTrainer best(dist, Net(), kMean, options());
  best.load_checkpoint(folder / "best");
  EXPECT_EQ(best.evaluate(Line(20)).step, 6);
}

TEST(TrainerLoop, TheSmallerLossIsTheBetterUnlessSaid) {
  TrainerOptions patient = options();
  patient.patience = 1;
  patient.learning_rate = 0;
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, patient);
  const TrainingResult result = trainer.fit(Line(20), Line(20));
  EXPECT_EQ(result.step, 6);
  EXPECT_EQ(result.best_step, 3);
}

TEST(TrainerLoop, ValidatesWithAveragedWeightsWhereAsked) {
  TrainerOptions averaging = options();
  averaging.epochs = 1;
  averaging.ema_decay = 0.9;
  averaging.validation_weights = Weights::averaged;
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, averaging);
  const TrainingResult result = trainer.fit(Line(20), Line(20));
  EXPECT_EQ(*result.validation_loss, trainer.evaluate(Line(20), Weights::averaged).loss);
  EXPECT_NE(*result.validation_loss, trainer.evaluate(Line(20)).loss);
}

TEST(TrainerLoop, AnAverageThatACheckpointLacksBeginsWithItsWeights) {
  const TemporaryFolder folder;
  const auto dist = setup_distributed();
  DistributedTrainer without(dist, Net(), kMean, options());
  without.train_epoch(Line(20));
  without.save_checkpoint(folder / "one");
  TrainerOptions averaging = options();
  averaging.ema_decay = 0.9;
  DistributedTrainer with(dist, Net(), kMean, averaging);
  with.load_checkpoint(folder / "one");
  EXPECT_EQ(with.evaluate(Line(20), Weights::averaged).loss, without.evaluate(Line(20)).loss);
  // And the other way round.
  with.train_epoch(Line(20));
  with.save_checkpoint(folder / "one");
  without.load_checkpoint(folder / "one");
  EXPECT_EQ(with.evaluate(Line(20)).loss, without.evaluate(Line(20)).loss);
}

TEST(TrainerLoop, GoesOnInOtherDataOnlyBetweenEpochs) {
  const DistributedManager dist = setup_distributed();
  DistributedTrainer trainer(dist, Net(), kMean, options());
  EXPECT_EQ(trainer.train_epoch(Line(20)).step, 3);
  EXPECT_EQ(trainer.train_epoch(Line(15)).step, 6);
  trainer.on_step([](const StepEnd&) { return Then::stop; });
  // A GPU's step is known one step later.
  EXPECT_EQ(trainer.train_epoch(Line(15)).step, dist.device().is_cuda() ? 8 : 7);
  EXPECT_THAT(usage_error([&] { trainer.train_epoch(Line(20)); }),
              HasSubstr("the saved data position is of 15 samples"));
}

TEST(TrainerLoop, FitGoesOnAfterAnEpochOfTheProgram) {
  TrainerOptions two = options();
  two.epochs = 2;
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, two);
  trainer.train_epoch(Line(20));
  const TrainingResult result = trainer.fit(Line(20));
  EXPECT_EQ(result.resumed_after, 3);
  EXPECT_EQ(result.step, 6);
}

TEST(TrainerLoop, NeedsNoLengthWithoutFit) {
  TrainerOptions endless = options();
  endless.epochs.reset();
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, endless);
  EXPECT_EQ(trainer.train_epoch(Line(20)).step, 3);
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(20)); }), HasSubstr("how long to train"));
}

TEST(TrainerLoop, SaysWhatIsMissing) {
  const auto dist = setup_distributed();
  const auto complaint = [&](auto change) {
    TrainerOptions changed = options();
    change(changed);
    DistributedTrainer trainer(dist, Net(), kMean, changed);
    trainer.add_metric("high", [](const at::Tensor&, const at::Tensor&) { return 1; });
    return usage_error([&] { trainer.fit(Line(20)); });
  };
  EXPECT_THAT(complaint([](TrainerOptions& o) { o.patience = 1; }),
              HasSubstr("no validation set to judge"));
  EXPECT_THAT(complaint([](TrainerOptions& o) { o.keep_best = true; }), HasSubstr("set output"));
  EXPECT_THAT(complaint([](TrainerOptions& o) { o.ema_decay = 1; }), HasSubstr("below 1"));
  EXPECT_THAT(complaint([](TrainerOptions& o) { o.validation_weights = Weights::averaged; }),
              HasSubstr("ema_decay is 0"));
  TrainerOptions judged = options();
  judged.patience = 1;
  judged.judge.metric = "low";
  DistributedTrainer trainer(dist, Net(), kMean, judged);
  trainer.add_metric("high", [](const at::Tensor&, const at::Tensor&) { return 1; });
  EXPECT_THAT(usage_error([&] { trainer.fit(Line(20), Line(20)); }),
              HasSubstr("judge.metric is \"low\", and validations have validation_loss, high"));
  EXPECT_THAT(usage_error([&] { trainer.load_checkpoint("/nowhere"); }),
              HasSubstr("'/nowhere' has no checkpoint"));
  EXPECT_THAT(usage_error([&] { trainer.save_checkpoint("/proc/nowhere"); }),
              HasSubstr("could not be written"));
  EXPECT_THAT(usage_error([&] { trainer.evaluate(Line(20), Weights::averaged); }),
              HasSubstr("ema_decay is 0"));
  EXPECT_THAT(usage_error([&] { trainer.predict(Line(0)); }), HasSubstr("no samples to predict"));
}

TEST(TrainerLoop, RefusesOutputsOfSeveralShapes) {
  DistributedTrainer trainer(setup_distributed(), Net(), kMean, options());
  std::int64_t width = 1;
  EXPECT_THAT(usage_error([&] {
                trainer.predict(Line(20), [&](const at::Tensor& output) {
                  return output.expand({output.size(0), width++});
                });
              }),
              HasSubstr("have the shapes [1] and [3]"));
}

TEST(DeepSpeedTrainer, TrainsAsItsConfigSays) {
  const TemporaryFolder folder;
  std::ofstream(folder / "ds.json") << R"({
    "train_batch_size": 10,
    "train_micro_batch_size_per_gpu": 5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupDecayLR",
                  "params": {"warmup_num_steps": 1, "warmup_max_lr": 0.1}},
    "zero_optimization": {"stage": 3},
    "device": "cpu"
  })";
  const std::string file = (folder / "ds.json").string();
  DeepSpeedTrainer trainer([] { return Net(); }, kMean, file,
                           {.max_steps = 8, .epochs = 5, .progress_fd = -1});
  EXPECT_EQ(trainer.dist().config().sharding_strategy, ShardingStrategy::FULL_SHARD);
  double last_rate = 1;
  trainer.on_step([&](const StepEnd& step) { last_rate = step.learning_rate; });
  const TrainingResult result = trainer.fit(Line(20));
  EXPECT_EQ(result.step, 8);
  // The schedule ends with the run.
  EXPECT_LT(last_rate, 0.05);
}

TEST(TrainerLoop, OnSeveralRanks) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    const TemporaryFolder folder;
    ranks::expect_cells_pass(num_ranks, {"--loops", folder.path().string()});
    if (num_ranks == 3)
      for (const int others : {1, 2})
        ranks::expect_cells_pass(others, {"--resharded", folder.path().string()});
  }
}

}  // namespace
}  // namespace lockstep
