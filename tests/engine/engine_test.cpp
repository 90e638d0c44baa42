#include <lockstep/train/engine.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpoint/tensors.h>
#include <lockstep/observe/csv_file.h>
#include <lockstep/train/options.h>
#include <lockstep/train/stepper.h>
#include <tests/ranks/job.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "layouts.h"
#include "plain_models.h"

namespace lockstep {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

const auto kPoints = std::make_shared<plain::Points>(20);
const auto kMlp = [] { return std::make_shared<plain::Mlp>(); };

json config_with(const json& changes = {}) {
  json config = {{"train_batch_size", 8},
                 {"train_micro_batch_size_per_gpu", 4},
                 {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.1}}}}},
                 {"seed", 3},
                 {"device", "cpu"},
                 {"steps_per_print", 1000}};
  if (!changes.is_null()) config.update(changes);
  return config;
}

auto engine_with(const json& changes = {}) {
  return initialize(EngineConfig::from_json(config_with(changes).dump()), kMlp);
}

at::Tensor loss_of(auto& engine, const EngineBatch& batch) {
  return plain::mean_loss(engine.forward(batch.data), batch.target);
}

// Steps of the engine, over as many epochs as they take.
void train_until(auto& engine, std::int64_t step) {
  while (engine.global_steps() < step)
    for (const auto& batch : engine.loader(kPoints)) {
      engine.backward(loss_of(engine, batch));
      engine.step();
      if (engine.global_steps() == step) break;
    }
}

at::Tensor weights(const auto& engine) { return engine.model()->third->weight.detach().clone(); }

TEST(Engine, StepsOnlyAtTheAccumulationBoundary) {
  auto engine = engine_with();
  EXPECT_EQ(engine.gradient_accumulation_steps(), 2);
  EXPECT_EQ(engine.train_micro_batch_size_per_gpu(), 4);
  EXPECT_EQ(engine.train_batch_size(), 8);
  std::vector<bool> at_boundary, changed;
  std::vector<std::int64_t> steps;
  for (const auto& batch : engine.loader(kPoints)) {
    at_boundary.push_back(engine.is_gradient_accumulation_boundary());
    const at::Tensor before = weights(engine);
    engine.backward(loss_of(engine, batch));
    engine.step();
    changed.push_back(!at::equal(before, weights(engine)));
    steps.push_back(engine.global_steps());
  }
  // 20 samples in passes of 4: the last step has only one.
  EXPECT_THAT(at_boundary, ElementsAre(false, true, false, true, true));
  EXPECT_THAT(changed, ElementsAre(false, true, false, true, true));
  EXPECT_THAT(steps, ElementsAre(0, 1, 1, 2, 3));
  EXPECT_EQ(engine.epoch(), 1);
  EXPECT_EQ(engine.global_samples(), 20);
  EXPECT_EQ(engine.last_step().count, 4);
}

TEST(Engine, TakesWholeStepsAsALoopDoes) {
  auto engine = engine_with(), loop = engine_with();
  const auto batches = engine.loader(kPoints);
  // The last step of an epoch has one pass in place of two.
  while (engine.global_steps() < 5) {
    const double loss = engine.train_batch(batches, plain::mean_loss);
    train_until(loop, engine.global_steps());
    EXPECT_EQ(loss, loop.last_step().loss);
  }
  EXPECT_TRUE(at::equal(weights(engine), weights(loop)));
  EXPECT_EQ(engine.epoch(), 1);
  EXPECT_EQ(engine.global_samples(), 36);
}

TEST(Engine, TakesAWholeStepAfterALoopThatWasLeft) {
  auto engine = engine_with(), loop = engine_with();
  for (const auto& batch : engine.loader(kPoints)) {
    if (engine.global_steps() == 1) break;
    engine.backward(loss_of(engine, batch));
    engine.step();
  }
  engine.train_batch(engine.loader(kPoints), plain::mean_loss);
  train_until(loop, 2);
  EXPECT_TRUE(at::equal(weights(engine), weights(loop)));
}

TEST(Engine, TakesWholeStepsOfTheProgramsOwnBatches) {
  auto engine = engine_with();
  const data::Batch batch = kPoints->batch(std::vector<std::int64_t>{0, 1, 2});
  std::vector<EngineBatch> batches = {{batch.input, batch.target}};
  EXPECT_THAT(usage_error([&] { engine.train_batch(batches, plain::mean_loss); }),
              HasSubstr("1 batch was given, and a step has 2 passes"));
  batches.push_back({batch.input.narrow(0, 0, 0), batch.target});
  EXPECT_THAT(usage_error([&] { engine.train_batch(batches, plain::mean_loss); }),
              HasSubstr("a batch without samples"));
  batches[1] = {batch.input.narrow(0, 0, 1), batch.target.narrow(0, 0, 1)};
  const double loss = engine.train_batch(batches, [](const auto& output, const auto& target) {
    return nn::LossSum{plain::mean_loss(output, target) * target.size(0) * 2, target.size(0) * 2};
  });
  EXPECT_EQ(engine.last_step().count, 8);
  EXPECT_EQ(engine.last_step().loss, loss);
  const auto evaluated = engine.eval_batch(batches[1], plain::mean_loss);
  EXPECT_EQ(evaluated.count, 1);
  EXPECT_TRUE(at::equal(evaluated.output, engine.forward(batches[1].data)));
  EXPECT_NEAR(evaluated.loss,
              plain::mean_loss(evaluated.output, batches[1].target).template item<double>(), 1e-6);
}

TEST(Engine, TakesTokensOfAnyNumber) {
  auto engine = engine_with({{"train_micro_batch_size_per_gpu", 8}});
  // Two passes without a loader would be two steps; their sums and counts make the mean.
  for (const auto& batch : engine.loader(kPoints)) {
    engine.backward(loss_of(engine, batch) * 5.0, 10);
    engine.step();
    break;
  }
  EXPECT_EQ(engine.last_step().count, 10);
}

TEST(Engine, NeedsNoLoaderForSumsAndCounts) {
  auto engine = engine_with({{"gradient_accumulation_steps", 2}});
  const data::Batch batch = kPoints->batch(std::vector<std::int64_t>{0, 1, 2});
  for (int pass = 0; pass < 4; ++pass) {
    EXPECT_EQ(engine.is_gradient_accumulation_boundary(), pass % 2 == 1);
    engine.backward(plain::mean_loss(engine.forward(batch.input), batch.target) * 3, 3);
    engine.step();
  }
  EXPECT_EQ(engine.global_steps(), 2);
  EXPECT_EQ(engine.last_step().count, 6);
}

TEST(Engine, ClipsByTheNormOfAllGradients) {
  auto engine = engine_with({{"gradient_clipping", 1e-3}});
  const at::Tensor before = weights(engine);
  train_until(engine, 1);
  EXPECT_GT(engine.get_global_grad_norm(), 1e-2);
  // A learning rate of 0.1 and gradients of a norm of 0.001.
  EXPECT_LE((weights(engine) - before).norm().item<double>(), 1.001e-4);
}

TEST(Engine, FollowsTheSchedule) {
  auto engine = engine_with({{"scheduler",
                              {{"type", "WarmupLR"},
                               {"params",
                                {{"warmup_num_steps", 4},
                                 {"warmup_min_lr", 0},
                                 {"warmup_max_lr", 0.1},
                                 {"warmup_type", "linear"}}}}}});
  // As in DeepSpeed, whose schedule begins after the first step.
  for (const double rate : {0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1}) {
    EXPECT_DOUBLE_EQ(engine.get_lr(), rate);
    train_until(engine, engine.global_steps() + 1);
  }
}

TEST(Engine, AsksForTheLengthOfAScheduleThatEnds) {
  const json schedule = {
      {"scheduler", {{"type", "WarmupCosineLR"}, {"params", {{"warmup_num_steps", 2}}}}}};
  EXPECT_THAT(usage_error([&] { engine_with(schedule); }), HasSubstr("total_num_steps"));
  json with_length = schedule;
  with_length["max_steps"] = 6;
  auto engine = engine_with(with_length);
  train_until(engine, 6);
  EXPECT_LT(engine.get_lr(), 1e-3);
}

TEST(Engine, ContinuesToTheBit) {
  const testing::TemporaryFolder folder;
  auto whole = engine_with({{"optimizer", {{"params", {{"lr", 0.01}}}}}});
  train_until(whole, 7);
  auto first = engine_with({{"optimizer", {{"params", {{"lr", 0.01}}}}}});
  train_until(first, 4);  // within the second epoch
  first.save_checkpoint(folder.path(), "", {{"best", "0.25"}});
  auto second = engine_with({{"optimizer", {{"params", {{"lr", 0.01}}}}}});
  const auto loaded = second.load_checkpoint(folder.path());
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->global_step, 4);
  EXPECT_EQ(loaded->client_state.at("best"), "0.25");
  EXPECT_EQ(second.epoch(), 1);
  train_until(second, 7);
  EXPECT_TRUE(at::equal(weights(second), weights(whole)));
  EXPECT_EQ(second.last_step().loss, whole.last_step().loss);
  EXPECT_EQ(second.global_samples(), whole.global_samples());
}

TEST(Engine, FindsCheckpointsByTheirTags) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with();
  EXPECT_FALSE(engine.load_checkpoint(folder.path()));
  train_until(engine, 1);
  engine.save_checkpoint(folder.path(), "good");
  train_until(engine, 2);
  engine.save_checkpoint(folder.path(), "bad");
  train_until(engine, 3);
  engine.save_checkpoint(folder.path());
  EXPECT_EQ(engine.load_checkpoint(folder.path())->global_step, 3);
  EXPECT_EQ(engine.load_checkpoint(folder.path(), "good")->global_step, 1);
  EXPECT_EQ(engine.global_steps(), 1);
  EXPECT_THAT(usage_error([&] { engine.load_checkpoint(folder.path(), "best"); }),
              AllOf(HasSubstr("no checkpoint with the tag \"best\": it has \"bad\", \"good\"")));
  for (const char* tag : {"a/b", "..", ".hidden", "latest", "step-00000007", "two\nlines"})
    EXPECT_THAT(usage_error([&] { engine.save_checkpoint(folder.path(), tag); }),
                HasSubstr("cannot be a checkpoint's tag"));
}

TEST(Engine, LoadsWhatWasSavedLastWhicheverStepItWasOf) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with();
  train_until(engine, 1);
  engine.save_checkpoint(folder.path(), "start");
  train_until(engine, 4);
  engine.save_checkpoint(folder.path(), "best");
  engine.save_checkpoint(folder.path());
  // Back to the start, and not as far as before.
  engine.load_checkpoint(folder.path(), "start");
  train_until(engine, 3);
  const auto best = engine.save_checkpoint(folder.path(), "best");
  EXPECT_TRUE(std::filesystem::exists(best / "manifest.json"));
  EXPECT_EQ(engine.load_checkpoint(folder.path(), "best")->global_step, 3);
  EXPECT_EQ(engine.load_checkpoint(folder.path())->path, best);
  const auto last = engine.save_checkpoint(folder.path());
  EXPECT_EQ(engine.load_checkpoint(folder.path())->path, last);
  EXPECT_EQ(last.filename(), "step-00000003");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "step-00000004"));
  // Without the file nobody knows which it was.
  std::filesystem::remove(folder.path() / "latest");
  EXPECT_THAT(usage_error([&] { engine.load_checkpoint(folder.path()); }),
              AllOf(HasSubstr("'latest'"), HasSubstr("is gone")));
}

TEST(Engine, RefusesADamagedCheckpoint) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with();
  train_until(engine, 1);
  const auto path = engine.save_checkpoint(folder.path(), "", {{"lr", "x"}});
  std::fstream(path / "client_state.json", std::ios::in | std::ios::out).seekp(4) << "Z";
  EXPECT_THAT(usage_error([&] { engine.load_checkpoint(folder.path()); }),
              HasSubstr("client_state.json"));
}

TEST(Engine, WritesAndReadsTheModelAlone) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with({{"sharding_strategy", "FULL_SHARD"}});
  train_until(engine, 2);
  const auto file = folder.path() / "model.safetensors";
  engine.save_model(file);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : checkpoint::load_tensors(file)) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("first.bias", "first.weight", "second.bias", "second.weight",
                                 "third.bias", "third.weight"));
  auto other = engine_with({{"seed", 4}});
  other.load_model(file);
  const data::Batch batch = kPoints->batch(std::vector<std::int64_t>{5, 6});
  EXPECT_TRUE(at::equal(other.forward(batch.input), engine.forward(batch.input)));
  EXPECT_EQ(other.global_steps(), 0);
}

TEST(Engine, KeepsGradientsOnTheRankUnderNoSync) {
  auto whole = engine_with({{"train_micro_batch_size_per_gpu", 8}});
  train_until(whole, 2);
  // The same samples, in passes that take no step.
  auto engine = engine_with({{"train_batch_size", 4}});
  std::int64_t pass = 0;
  for (const auto& batch : engine.loader(kPoints)) {
    if (engine.global_steps() == 2) break;
    if (pass++ % 2 == 0) {
      const auto local = engine.no_sync();
      engine.backward(loss_of(engine, batch));
      EXPECT_THAT(usage_error([&] { engine.step(); }), HasSubstr("while no_sync() holds"));
    } else {
      engine.backward(loss_of(engine, batch));
      engine.step();
    }
    if (pass > 1) continue;
    EXPECT_THAT(usage_error([&] { engine.save_checkpoint("nowhere"); }),
                HasSubstr("gradients of passes under no_sync() wait"));
  }
  EXPECT_TRUE(at::allclose(weights(engine), weights(whole), 1e-6, 1e-6));
  EXPECT_EQ(engine.last_step().count, 8);
  EXPECT_EQ(engine.global_samples(), 16);
}

TEST(Engine, KeepsNoGradientsWithinAStep) {
  auto engine = engine_with({{"train_batch_size", 8}, {"gradient_accumulation_steps", 2}});
  for (const auto& batch : engine.loader(kPoints)) {
    engine.backward(loss_of(engine, batch));
    engine.step();
    EXPECT_THAT(usage_error([&] { (void)engine.no_sync(); }),
                HasSubstr("within a step, of which 1 of 2 passes are done"));
    break;
  }
}

TEST(Engine, AnEpochMayEndUnderNoSync) {
  auto engine = engine_with({{"train_batch_size", 4}});
  while (engine.epoch() < 2) {
    for (const auto& batch : engine.loader(kPoints)) {
      const auto local = engine.no_sync();
      engine.backward(loss_of(engine, batch));
    }
    EXPECT_EQ(engine.global_steps(), 0);
  }
  for (const auto& batch : engine.loader(kPoints)) {
    engine.backward(loss_of(engine, batch));
    engine.step();
    break;
  }
  EXPECT_EQ(engine.last_step().count, 44);
}

// The header and the first cell of each row.
std::vector<std::string> steps_of(const std::filesystem::path& csv) {
  std::ifstream file(csv);
  std::vector<std::string> cells;
  for (std::string line; std::getline(file, line);)
    cells.push_back(cells.empty() ? line : line.substr(0, line.find(',')));
  return cells;
}

TEST(Engine, WritesTheMetricsOfItsSteps) {
  const testing::TemporaryFolder folder;
  const auto output = folder.path() / "run";
  const json config = {{"output", output.string()}, {"wall_clock_breakdown", true}};
  const std::string header =
      "step,loss,validation_loss,learning_rate,gradient_norm,samples_per_second,seconds,"
      "data_seconds,forward_seconds,backward_seconds,update_seconds";
  {
    auto engine = engine_with(config);
    train_until(engine, 3);
    EXPECT_THAT(steps_of(output / "metrics.csv"), ElementsAre(header, "1", "2", "3"));
    engine.save_checkpoint();
    train_until(engine, 4);
    EXPECT_THAT(usage_error([&] { engine_with(config); }), HasSubstr("another run writes into"));
  }
  EXPECT_TRUE(std::filesystem::exists(output / "loss.svg"));
  EXPECT_FALSE(std::filesystem::is_empty(output / "tensorboard"));
  auto engine = engine_with(config);
  EXPECT_EQ(engine.load_checkpoint()->global_step, 3);
  train_until(engine, 5);
  EXPECT_THAT(steps_of(output / "metrics.csv"), ElementsAre(header, "1", "2", "3", "4", "5"));
  std::ifstream written(output / "config.json");
  EXPECT_EQ(json::parse(written).at("output"), output.string());
}

// The time of the first step is within `seconds`, which begins where the files are made. What the
// loss counts is so much larger than the samples that no slow machine makes one look like the
// other.
TEST(Engine, ReportsTheRateOfSamplesWhateverTheLossCounts) {
  const auto counts = [](const at::Tensor& output, const at::Tensor& target) {
    return nn::LossSum{plain::mean_loss(output, target), std::int64_t{1} << 40};
  };
  const auto expect_samples = [](const std::filesystem::path& output, double most) {
    const observe::CsvTable table(output / "metrics.csv");
    const auto& row = table.rows().front();
    const auto value = [&](const char* name) {
      return observe::CsvTable::value(row, table.column(name).value()).value();
    };
    const double samples = value("samples_per_second") * value("seconds");
    EXPECT_GE(samples, 7.9);
    EXPECT_LT(samples, most);
  };
  const testing::TemporaryFolder folder;
  constexpr double kMost = 8e6;
  {
    auto engine = engine_with({{"output", (folder.path() / "loader").string()}});
    engine.train_batch(engine.loader(kPoints), counts);
  }
  expect_samples(folder.path() / "loader", kMost);
  {
    auto engine = engine_with({{"output", (folder.path() / "own").string()}});
    const data::Batch batch = kPoints->batch(std::vector<std::int64_t>{0, 1, 2, 3});
    engine.train_batch(std::vector<EngineBatch>(2, {batch.input, batch.target}), counts);
  }
  expect_samples(folder.path() / "own", kMost);
}

TEST(Engine, WritesMetricsWhereDeepSpeedsKeysSay) {
  const testing::TemporaryFolder folder;
  {
    auto engine = engine_with(
        {{"csv_monitor",
          {{"enabled", true}, {"output_path", folder.path().string()}, {"job_name", "mine"}}}});
    train_until(engine, 2);
  }
  EXPECT_EQ(steps_of(folder.path() / "mine" / "metrics.csv").size(), 3u);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(Engine, SavesByItselfAndKeepsTheNewest) {
  const testing::TemporaryFolder folder;
  const json config = {{"output", (folder.path() / "run").string()},
                       {"checkpoint", {{"interval", 2}, {"keep", 2}, {"async", true}}}};
  const auto saved = folder.path() / "run" / "checkpoints";
  {
    auto engine = engine_with(config);
    train_until(engine, 8);
    engine.wait_for_checkpoint();
    std::vector<std::string> names;
    for (const auto& one : std::filesystem::directory_iterator(saved))
      if (one.is_directory()) names.push_back(one.path().filename());
    EXPECT_THAT(names, ::testing::UnorderedElementsAre("step-00000006", "step-00000008"));
    EXPECT_EQ(engine.load_checkpoint()->global_step, 8);
    // Back to an earlier step: what was saved last stays, whichever step it is of.
    engine.load_checkpoint(saved, "");
    train_until(engine, 9);
    engine.save_checkpoint();
    // The end of the engine waits for it.
  }
  auto engine = engine_with(config);
  EXPECT_EQ(engine.load_checkpoint()->global_step, 9);
}

TEST(Engine, SaysWhyACheckpointWasNotWritten) {
  auto engine = engine_with({{"checkpoint", {{"async", true}}}});
  engine.save_checkpoint("/proc/nowhere");
  EXPECT_THAT(usage_error([&] { engine.wait_for_checkpoint(); }),
              HasSubstr("the checkpoint of step 0 could not be written"));
  EXPECT_THAT(usage_error([&] { engine.save_checkpoint(); }), HasSubstr("set output"));
}

TEST(Engine, BeginsWhereTheConfigSays) {
  const testing::TemporaryFolder folder;
  auto first = engine_with();
  train_until(first, 2);
  const auto start = first.save_checkpoint(folder.path() / "first");
  const auto from = [&](const json& resume) {
    return engine_with(
        {{"output", (folder.path() / "run").string()}, {"checkpoint", {{"resume", resume}}}});
  };
  {
    auto engine = from(start.string());
    EXPECT_EQ(engine.load_checkpoint()->global_step, 2);
    train_until(engine, 3);
    engine.save_checkpoint();
  }
  {
    auto engine = from(start.string());
    EXPECT_EQ(engine.load_checkpoint()->global_step, 3);
  }
  auto engine = from("never");
  EXPECT_THAT(usage_error([&] { engine.load_checkpoint(); }), HasSubstr("choose another output"));
}

TEST(Engine, EvaluatesTheMeanOverAllSamples) {
  auto engine = engine_with();
  const auto loss = [&](const EngineBatch& batch) { return loss_of(engine, batch); };
  const double mean = engine.evaluate(kPoints, loss);
  std::vector<std::int64_t> all(20);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const data::Batch batch = kPoints->batch(all);
  EXPECT_NEAR(mean,
              plain::mean_loss(engine.forward(batch.input), batch.target).template item<double>(),
              1e-6);
  EXPECT_TRUE(engine.model()->is_training());
  EXPECT_EQ(engine.global_samples(), 0);
}

TEST(Engine, StopsAtALossThatIsNotFinite) {
  auto engine = engine_with();
  const at::Tensor before = weights(engine);
  const auto not_finite = [&] {
    for (const auto& batch : engine.loader(kPoints)) {
      engine.backward(loss_of(engine, batch) * std::numeric_limits<float>::infinity());
      engine.step();
    }
  };
  try {
    not_finite();
    ADD_FAILURE() << "training went on";
  } catch (const train::TrainingStopped& stopped) {
    EXPECT_THAT(stopped.what(), HasSubstr("training stopped at step 1: the loss is inf"));
  }
  EXPECT_TRUE(at::equal(weights(engine), before));
}

TEST(Engine, SkipsStepsWhereTheConfigSaysSo) {
  auto engine = engine_with({{"on_non_finite_loss", "skip"}});
  const at::Tensor before = weights(engine);
  for (const auto& batch : engine.loader(kPoints)) {
    engine.backward(loss_of(engine, batch) * std::numeric_limits<float>::quiet_NaN());
    engine.step();
  }
  EXPECT_TRUE(engine.last_step().was_skipped);
  EXPECT_EQ(engine.skipped_steps(), 3);
  EXPECT_TRUE(at::equal(weights(engine), before));
}

TEST(Engine, SaysWhatIsMissingOrTooMuch) {
  auto engine = engine_with();
  EXPECT_THAT(usage_error([&] { engine.step(); }), HasSubstr("step() was called without backward"));
  const data::Batch batch = kPoints->batch(std::vector<std::int64_t>{0});
  EXPECT_THAT(usage_error([&] {
                engine.backward(plain::mean_loss(engine.forward(batch.input), batch.target));
              }),
              HasSubstr("take batches from engine.loader(dataset)"));
  EXPECT_THAT(usage_error([&] {
                for (const auto& given : engine.loader(kPoints)) (void)given;
              }),
              HasSubstr("a batch of the loader was left out"));
}

TEST(Engine, RefusesASecondBackwardInAPass) {
  auto engine = engine_with();
  for (const auto& batch : engine.loader(kPoints)) {
    engine.backward(loss_of(engine, batch));
    EXPECT_THAT(usage_error([&] { engine.backward(loss_of(engine, batch)); }),
                HasSubstr("backward() was called twice in one pass"));
    EXPECT_THAT(usage_error([&] { engine.save_checkpoint("nowhere"); }),
                HasSubstr("save_checkpoint() was called within a step"));
    EXPECT_THAT(usage_error([&] { (void)engine.loader(kPoints).begin(); }),
                HasSubstr("a loop over a loader begins within a step"));
    engine.step();
    EXPECT_THAT(usage_error([&] { engine.load_checkpoint("nowhere"); }),
                HasSubstr("1 of 2 have been"));
    break;
  }
}

TEST(Engine, ALoopMayBeLeftBeforeABatchIsUsed) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with(), other = engine_with();
  for (const auto& batch : engine.loader(kPoints)) {
    if (engine.global_steps() == 2) break;
    engine.backward(loss_of(engine, batch));
    engine.step();
  }
  engine.save_checkpoint(folder.path());
  EXPECT_EQ(engine.global_samples(), 16);
  train_until(engine, 5);
  train_until(other, 5);
  EXPECT_TRUE(at::equal(weights(engine), weights(other)));
}

TEST(Engine, ADataSetOfAnotherSizeDoesNotGoOnWithinAnEpoch) {
  auto engine = engine_with();
  train_until(engine, 1);
  EXPECT_THAT(
      usage_error([&] { (void)engine.loader(std::make_shared<plain::Points>(24)).begin(); }),
      HasSubstr("the saved data position is of 20 samples with seed 3, but this run has 24"));
}

TEST(Engine, AskedForAnotherBatchItGoesOnWithThat) {
  const testing::TemporaryFolder folder;
  auto engine = engine_with();
  train_until(engine, 1);
  engine.save_checkpoint(folder.path());
  // 12 samples of the epoch are left, less than a step that may be left out.
  auto larger = engine_with({{"train_batch_size", 16}, {"dataloader_drop_last", true}});
  larger.load_checkpoint(folder.path());
  EXPECT_EQ(larger.train_batch_size(), 16);
  train_until(larger, 3);
  EXPECT_EQ(larger.epoch(), 3);
  EXPECT_EQ(larger.global_samples(), 8 + 2 * 16);
  EXPECT_THAT(usage_error([&] {
                auto none = engine_with({{"train_batch_size", 24}, {"dataloader_drop_last", true}});
                train_until(none, 1);
              }),
              HasSubstr("less than one step of 24"));
}

TEST(Engine, GoesOnAfterAStepThatFailed) {
  auto engine = engine_with(), other = engine_with();
  bool failed = false;
  while (engine.global_steps() < 4) try {
      for (const auto& batch : engine.loader(kPoints)) {
        const bool bad = !failed && engine.global_steps() == 0;
        engine.backward(loss_of(engine, batch) *
                        (bad ? std::numeric_limits<float>::infinity() : 1.0f));
        engine.step();
        if (engine.global_steps() == 4) break;
      }
    } catch (const train::TrainingStopped&) {
      failed = true;
    }
  EXPECT_TRUE(failed);
  EXPECT_EQ(engine.skipped_steps(), 1);
  // The other one trains on all batches but the first step's.
  std::int64_t pass = 0;
  while (other.global_steps() < 4)
    for (const auto& batch : other.loader(kPoints)) {
      other.backward(loss_of(other, batch) * (pass++ < 2 ? 0.0f : 1.0f));
      other.step();
      if (other.global_steps() == 4) break;
    }
  EXPECT_TRUE(at::allclose(weights(engine), weights(other), 1e-6, 1e-6));
}

TEST(Engine, LeavesPartsInTheModeThatTheyHave) {
  auto engine = engine_with();
  engine.model()->first->eval();
  engine.evaluate(kPoints, [&](const EngineBatch& batch) {
    EXPECT_FALSE(engine.model()->second->is_training());
    return loss_of(engine, batch);
  });
  EXPECT_FALSE(engine.model()->first->is_training());
  EXPECT_TRUE(engine.model()->second->is_training());
}

TEST(Engine, RefusesAnEmptyDataSet) {
  auto engine = engine_with();
  EXPECT_THAT(usage_error([&] { (void)engine.loader(std::make_shared<plain::Points>(0)).begin(); }),
              HasSubstr("there are no samples to train on"));
}

TEST(Engine, NamesTheFactoryThatMakesNothing) {
  EXPECT_THAT(usage_error([] {
                initialize(EngineConfig::from_json(config_with().dump()),
                           [] { return std::shared_ptr<plain::Mlp>(); });
              }),
              HasSubstr("no model"));
}

TEST(EngineConfig, RefusesWhatIsTheProgramsAndNamesTheWay) {
  const auto mistake = [](const json& changes) {
    return usage_error([&] { (void)EngineConfig::from_json(config_with(changes).dump()); });
  };
  EXPECT_THAT(mistake({{"model", {{"hidden_size", 8}}}}),
              AllOf(HasSubstr("model describes a model"), HasSubstr("remove it")));
  EXPECT_THAT(mistake({{"data", {{"train", "x.txt"}, {"num_workers", 0}}}}),
              AllOf(HasSubstr("data.train is of data in files of tokens"), HasSubstr("remove it")));
  EXPECT_THAT(mistake({{"tensor_plan", {{"fc", "column"}}}}),
              HasSubstr("parallel.tensor is 1, which cuts no layer"));
  EXPECT_THAT(
      mistake({{"parallel", {{"tensor", 2}}}, {"tensor_plan", {{"fc", "columns"}}}}),
      HasSubstr(
          "tensor_plan has \"columns\" for \"fc\": it must be 'column', 'row', 'heads' or 'qkv'"));
  EXPECT_THAT(mistake({{"parallel", {{"tensor", 2}}}, {"tensor_plan", "column"}}),
              HasSubstr("it must be a section"));
  EXPECT_THAT(mistake({{"parallel", {{"pipeline", 2}, {"balance", "time"}}}}),
              HasSubstr("take \"layers\" or \"parameters\""));
  EXPECT_THAT(mistake({{"parallel", {{"context", 2}}}}), HasSubstr("docs/context.md"));
  EXPECT_THAT(mistake({{"activation_checkpointing", {{"ratio", 0.5}}}}),
              HasSubstr("wrap_activation_checkpointing"));
  EXPECT_THAT(mistake({{"train_batch_sise", 8}}), HasSubstr("train_batch_size"));
  EXPECT_THAT(mistake({{"checkpoint", {{"interval", 5}}}}), HasSubstr("set output"));
  EXPECT_THAT(mistake({{"tensorboard", {{"enabled", true}}}}),
              HasSubstr("set output, or output_path beside it"));
}

TEST(EngineConfig, ComesBackFromACheckpointsText) {
  const auto config = EngineConfig::from_json(
      config_with({{"data", {{"num_workers", 0}}},
                   {"zero_optimization", {{"stage", 2}}},
                   {"parallel", {{"tensor", 2}}},
                   {"tensor_plan", {{"blocks.*.fc1", "Column"}, {"blocks.*.fc2", "row"}}}})
          .dump());
  EXPECT_THAT(config.values().tensor_plan,
              ElementsAre(Pair("blocks.*.fc1", train::LayerCut::column),
                          Pair("blocks.*.fc2", train::LayerCut::row)));
  EXPECT_EQ(config.values().data.num_workers, 0);
  const std::string text = train::to_json(config.values());
  EXPECT_EQ(train::to_json(EngineConfig::from_json(text).values()), text);
}

// For batch norms, which want two samples, where a pass may have as many.
TEST(StandIn, HasTwoSamplesWhereAPassMayHaveThem) {
  const auto of = [](std::int64_t size, std::int64_t micro) {
    return train::stand_in(plain::Points(size), micro, at::kCPU);
  };
  for (const auto& [batch, wanted] :
       {std::pair(of(9, 4), 2), std::pair(of(9, 1), 1), std::pair(of(1, 4), 1)}) {
    EXPECT_EQ(batch.input.size(0), wanted);
    EXPECT_EQ(batch.target.size(0), wanted);
  }
  torch::nn::BatchNorm1d norm(6);
  EXPECT_TRUE(norm(of(9, 4).input).isfinite().all().item<bool>());
}

TEST(EngineParity, HasTwelveLayoutsOfSeveralAxesForEachModel) {
  for (const Subject& subject : subjects()) {
    std::int64_t of_several = 0, of_three = 0;
    for (const int num_ranks : {2, 4, 8})
      for (const auto& all : {layouts(subject, num_ranks), pipelines(subject, num_ranks)}) {
        of_several +=
            std::ranges::count_if(all, [](const Layout& one) { return one.num_axes > 1; });
        of_three += std::ranges::count(all, 3, &Layout::num_axes);
      }
    EXPECT_GE(of_several, 12) << subject.name;
    EXPECT_GE(of_three, 1) << subject.name;
  }
}

TEST(EngineParity, OnTwoAndFourRanks) {
  for (const int num_ranks : {2, 4}) ranks::expect_cells_pass(num_ranks, {"--parity"});
}

TEST(EngineParity, InPipelinesOfTwoAndFour) {
  for (const int num_ranks : {2, 4}) ranks::expect_cells_pass(num_ranks, {"--pipelines"});
}

TEST(EngineParity, OverThreeAxesOnEightRanks) { ranks::expect_cells_pass(8, {"--all"}); }

TEST(EngineMistakes, AreErrorsOnAllRanks) { ranks::expect_cells_pass(2, {"--mistakes"}); }

TEST(EngineParity, CheckpointsGoOnInOtherLayouts) {
  const testing::TemporaryFolder folder;
  ranks::expect_cells_pass(4, {"--save", folder.path().string()});
  for (const int num_ranks : {1, 2, 3})
    ranks::expect_cells_pass(num_ranks, {"--finish", folder.path().string()});
}

}  // namespace
}  // namespace lockstep
