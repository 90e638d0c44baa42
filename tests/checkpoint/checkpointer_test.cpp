// A job saves and loads checkpoints. Here it has one rank; tests/reshard has jobs of several.
#include <atomic>
#include <chrono>
#include <fstream>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/recovery/checkpointer.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "stalling_disk.h"
#include "tiny_disk.h"

namespace lockstep {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::StallingDisk;
using testing::TemporaryFolder;
using testing::TinyDisk;

mesh::HeldTensor tensor(const std::string& name, const at::Tensor& values) {
  return mesh::whole_tensor(name, values);
}

class OneRank : public ::testing::Test {
 protected:
  CheckpointContents contents(std::int64_t step) const {
    return {.tensors = {tensor("model/weight", weight), tensor("optimizer/step", count)},
            .state = {.step = step, .last_loss = 0.25},
            .files = {{"config.json", "{}"}}};
  }

  DistributedManager dist = setup_distributed();
  const RankMessages ranks{dist.world()};
  const TemporaryFolder folder;
  const at::Tensor weight = at::randn({30, 20});
  const at::Tensor count = at::full({}, 7, at::kLong);
};

TEST_F(OneRank, ComesBackWhole) {
  Checkpointer checkpoints(dist, folder.path());
  checkpoints.save(contents(5));
  EXPECT_TRUE(checkpoints.under_way());
  const at::Tensor saved = weight.clone();
  weight.add_(1);  // the save may still be writing it
  const SaveResult result = checkpoints.finish();
  ASSERT_TRUE(result.ok()) << result.error;
  EXPECT_EQ(result.path, folder / "step-00000005");
  EXPECT_FALSE(checkpoints.under_way());
  EXPECT_EQ(checkpoints.poll(), std::nullopt);
  EXPECT_EQ(checkpoints.bytes_written(), 30 * 20 * 4 + 8);
  EXPECT_EQ(testing::read_file(result.path / "config.json"), "{}");

  const at::Tensor got = at::zeros({30, 20}), number = at::zeros({}, at::kLong);
  const auto state = load_checkpoint(
      ranks, result.path, {tensor("model/weight", got), tensor("optimizer/step", number)},
      {.complete = {"model/", "optimizer/"}});
  EXPECT_EQ(state.step, 5);
  EXPECT_EQ(state.last_loss, 0.25);
  EXPECT_TRUE(at::equal(got, saved));
  EXPECT_EQ(number.item<std::int64_t>(), 7);
}

TEST_F(OneRank, TensorsOfAnyStridesAndTypes) {
  std::vector<mesh::HeldTensor> saved, loaded;
  for (const auto type :
       {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kBool, at::kByte}) {
    const std::string name = c10::toString(type);
    saved.push_back(tensor(name, at::randint(0, 2, {4, 6}).to(type).t()));
    loaded.push_back(tensor(name, at::zeros({4, 6}, type).t()));
  }
  saved.push_back(tensor("empty", at::empty({0, 3})));
  loaded.push_back(tensor("empty", at::empty({0, 3})));
  Checkpointer checkpoints(dist, folder.path());
  const SaveResult result = checkpoints.save_and_wait({.tensors = saved});
  ASSERT_TRUE(result.ok()) << result.error;
  load_checkpoint(ranks, result.path, loaded);
  for (std::size_t i = 0; i < saved.size(); ++i)
    EXPECT_TRUE(at::equal(loaded[i].values, saved[i].values)) << saved[i].name;
}

TEST_F(OneRank, WhatDoesNotFitTouchesNothing) {
  Checkpointer checkpoints(dist, folder.path());
  const auto path = checkpoints.save_and_wait(contents(1)).path;
  const at::Tensor number = at::zeros({}, at::kLong);
  const auto error = [&](const std::vector<mesh::HeldTensor>& tensors) {
    return usage_error([&] {
      load_checkpoint(ranks, path, tensors, {.complete = {"model/", "optimizer/"}});
    });
  };
  EXPECT_THAT(
      error({tensor("optimizer/step", number), tensor("model/weight", at::zeros({30, 21}))}),
      HasSubstr("'model/weight' is F32 [30, 20] in the checkpoint and F32 [30, 21] here"));
  EXPECT_EQ(number.item<std::int64_t>(), 0);
  EXPECT_THAT(error({tensor("optimizer/step", number),
                     tensor("model/weight", at::zeros({30, 20}, at::kDouble))}),
              HasSubstr("is F32 [30, 20] in the checkpoint and F64 [30, 20] here"));
  EXPECT_THAT(
      error({tensor("model/bias", at::zeros({3}))}),
      AllOf(HasSubstr("'model/bias' is missing"),
            HasSubstr("it has 'model/weight', 'optimizer/step', which this model has not")));
  EXPECT_NO_THROW(load_checkpoint(ranks, path, {tensor("optimizer/step", number)},
                                  {.complete = {"optimizer/"}}));
}

TEST_F(OneRank, SomeAreFilledOnlyWhereTheyAreThere) {
  Checkpointer checkpoints(dist, folder.path());
  const auto path = checkpoints.save_and_wait(contents(1)).path;
  const at::Tensor there = at::zeros({}, at::kLong), missing = at::ones({2}), other = at::ones({7});
  load_checkpoint(ranks, path, {},
                  {.where_there = {tensor("optimizer/step", there), tensor("none", missing),
                                   tensor("model/weight", other)}});
  EXPECT_EQ(there.item<std::int64_t>(), 7);
  EXPECT_EQ(missing.sum().item<float>(), 2);
  EXPECT_EQ(other.sum().item<float>(), 7) << "of another shape";
}

TEST_F(OneRank, OneSaveAtATime) {
  Checkpointer checkpoints(dist, folder.path());
  EXPECT_THAT(usage_error([&] { checkpoints.finish(); }), HasSubstr("no checkpoint being written"));
  checkpoints.save(contents(1));
  EXPECT_THAT(usage_error([&] { checkpoints.save(contents(2)); }),
              HasSubstr("a checkpoint of step 1 is still being written"));
  EXPECT_TRUE(checkpoints.finish().ok());
}

TEST_F(OneRank, OldOnesAreRemovedOnceANewOneIsThere) {
  Checkpointer checkpoints(dist, folder.path(), {.keep_last = 2});
  for (const int step : {1, 2, 3, 4}) ASSERT_TRUE(checkpoints.save_and_wait(contents(step)).ok());
  const auto all = checkpoint::list_checkpoints(folder.path());
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all.front().step, 3);
}

TEST_F(OneRank, WhatCannotBeSavedIsRefusedBeforeAnythingIsWritten) {
  Checkpointer checkpoints(dist, folder / "run");
  for (const char* name : {"manifest.json", "x.safetensors", "../config.json", "", ".", "a/b"}) {
    CheckpointContents bad = contents(1);
    bad.files = {{name, "text"}};
    EXPECT_THAT(usage_error([&] { checkpoints.save(bad); }),
                HasSubstr("cannot be added to a checkpoint"))
        << name;
  }
  CheckpointContents sparse = contents(1);
  sparse.tensors.push_back(
      {"sparse", at::eye(3).to_sparse(), {3, 3}, mesh::Placement::full({3, 3})});
  EXPECT_THAT(usage_error([&] { checkpoints.save(sparse); }),
              HasSubstr("'sparse' cannot be saved: it is sparse"));
  EXPECT_FALSE(exists(folder / "run"));
}

TEST_F(OneRank, AFullDiskIsToldAndLeavesTheOlderOnes) {
  const TinyDisk disk("256k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  Checkpointer checkpoints(dist, disk / "run");
  ASSERT_TRUE(checkpoints.save_and_wait(contents(1)).ok());
  CheckpointContents large = contents(2);
  large.tensors.push_back(tensor("large", at::zeros({300, 300})));
  checkpoints.save(large);
  const SaveResult result = checkpoints.finish();
  EXPECT_THAT(result.error, AllOf(HasSubstr("rank 0"), HasSubstr("not enough room in")));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(disk / "run"), {}), 1)
      << "nothing half-written stays";
  EXPECT_TRUE(checkpoints.save_and_wait(contents(3)).ok()) << "and the next one may have room";
}

// Steps go on beside the save: neither save() nor any poll() waits for the disk.
TEST_F(OneRank, TrainingDoesNotWaitForADiskThatStandsStill) {
  const StallingDisk disk;
  if (!disk.usable()) GTEST_SKIP() << "such a disk needs root, ext4 and a loop device";
  Checkpointer checkpoints(dist, disk / "run", {.keep_last = 1});
  ASSERT_TRUE(checkpoints.save_and_wait(contents(1)).ok());
  std::atomic<bool> waited{false};
  std::jthread rescuer([&](const std::stop_token& stop) {  // otherwise the test would wait forever
    for (int tenths = 0; tenths < 200 && !stop.stop_requested(); ++tenths)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    waited = !stop.stop_requested();
    if (waited) disk.go_on();
  });
  std::optional<SaveResult> result;
  // The disk stalls when the folder is made, when files are written, and when they are committed.
  EXPECT_TRUE(disk.stall());
  checkpoints.save(contents(2));
  for (int phase = 0; phase < 20 && !result && !waited; ++phase) {
    for (int step = 0; step < 20 && !result; ++step) {
      result = checkpoints.poll();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    disk.go_on();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    disk.stall();
  }
  rescuer.request_stop();
  rescuer.join();
  EXPECT_FALSE(waited) << "a call of training's waited for the disk";
  disk.go_on();
  if (!result) result = checkpoints.finish();
  EXPECT_TRUE(result->ok()) << result->error;
  EXPECT_EQ(checkpoint::list_checkpoints(disk / "run").size(), 1u);
}

// Removing the files of a failed save does not hold training up either.
TEST_F(OneRank, TrainingDoesNotWaitUntilAFailedSaveIsCleanedUp) {
  const StallingDisk disk;
  if (!disk.usable()) GTEST_SKIP() << "such a disk needs root, ext4 and a loop device";
  Checkpointer checkpoints(dist, disk / "run");
  constexpr std::int64_t kMoreThanTheDiskHas = 64 << 20;
  checkpoints.save({.tensors = {tensor("large", at::ones({kMoreThanTheDiskHas}, at::kByte))},
                    .state = {.step = 1}});
  const auto is_open = [&] {
    return std::filesystem::exists(disk / "run") && !std::filesystem::is_empty(disk / "run");
  };
  for (int i = 0; i < 20'000 && !is_open(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ASSERT_TRUE(is_open());
  EXPECT_TRUE(disk.stall());
  std::atomic<bool> waited{false};
  std::jthread rescuer([&](const std::stop_token& stop) {  // otherwise the test would wait forever
    for (int tenths = 0; tenths < 100 && !stop.stop_requested(); ++tenths)
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    waited = !stop.stop_requested();
    if (waited) disk.go_on();
  });
  for (int step = 0; step < 300; ++step) {
    EXPECT_EQ(checkpoints.poll(), std::nullopt) << "what was written is still there";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  rescuer.request_stop();
  rescuer.join();
  EXPECT_FALSE(waited) << "a call of training's waited for the disk";
  disk.go_on();
  EXPECT_THAT(checkpoints.finish().error, HasSubstr("not enough room in"));
  EXPECT_TRUE(std::filesystem::is_empty(disk / "run"));
}

// The bytes that this process has written to any file.
std::int64_t bytes_written_so_far() {
  std::ifstream io("/proc/self/io");
  std::string name;
  std::int64_t bytes = 0;
  while (io >> name >> bytes)
    if (name == "wchar:") return bytes;
  return 0;
}

// A process that leaves its generation does not write the rest of a checkpoint that cannot be
// completed any more.
TEST_F(OneRank, WhatNobodyWaitsForIsNotWrittenToTheEnd) {
  const StallingDisk disk;
  if (!disk.usable()) GTEST_SKIP() << "such a disk needs root, ext4 and a loop device";
  auto checkpoints = std::make_unique<Checkpointer>(dist, disk / "run");
  constexpr std::int64_t kBytes = 16 << 20;
  const at::Tensor large = at::ones({kBytes}, at::kByte);
  checkpoints->save({.tensors = {tensor("model/large", large)}, .state = {.step = 1}});
  while (!std::filesystem::exists(disk / "run") || std::filesystem::is_empty(disk / "run"))
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(disk.stall());
  const std::int64_t before = bytes_written_so_far();
  for (int i = 0; i < 100; ++i) {  // the writing begins, and then stalls
    EXPECT_EQ(checkpoints->poll(), std::nullopt);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::thread leaving([&] { checkpoints.reset(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_TRUE(disk.go_on());
  leaving.join();
  EXPECT_LT(bytes_written_so_far() - before, kBytes);
  EXPECT_TRUE(checkpoint::list_checkpoints(disk / "run").empty());
}

TEST_F(OneRank, AFolderThatCannotBeMadeIsTold) {
  testing::write_file(folder / "file", "");
  Checkpointer checkpoints(dist, folder / "file");
  checkpoints.save(contents(1));
  EXPECT_THAT(checkpoints.finish().error, HasSubstr("file"));
}

TEST_F(OneRank, ADamagedOneIsNamed) {
  Checkpointer checkpoints(dist, folder.path());
  const auto path = checkpoints.save_and_wait(contents(1)).path;
  std::string bytes = testing::read_file(path / "shard-00000.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_file(path / "shard-00000.safetensors", bytes);
  try {
    load_checkpoint(ranks, path,
                    {tensor("model/weight", at::zeros({30, 20})),
                     tensor("optimizer/step", at::zeros({}, at::kLong))});
    FAIL() << "it was loaded";
  } catch (const checkpoint::DamagedCheckpoint& damage) {
    EXPECT_THAT(damage.what(),
                AllOf(HasSubstr("shard-00000.safetensors"), HasSubstr("'model/weight'")));
  }
}

TEST_F(OneRank, AModelAndItsOptimizer) {
  const auto train = [&](auto& model, optim::Optimizer& optimizer) {
    dist.backward(model, model->forward(at::ones({2, 3}, dist.device())).square().sum(), 2);
    optimizer.step(0.1);
    optimizer.zero_grad();
  };
  auto model = dist.wrap_model(torch::nn::Linear(3, 4));
  auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
  train(model, *adamw);
  Checkpointer checkpoints(dist, folder.path());
  const auto path =
      checkpoints.save_and_wait({.tensors = state_of(dist, model, *adamw), .state = {.step = 1}})
          .path;
  auto other = dist.wrap_model(torch::nn::Linear(3, 4));
  auto its = dist.make_optimizer(other, optim::AdamWOptions{});
  EXPECT_EQ(load_checkpoint(dist, path, other, *its).step, 1);
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(at::equal(other->weight, model->weight)) << "after step " << 1 + step;
    train(model, *adamw);
    train(other, *its);
  }
}

}  // namespace
}  // namespace lockstep
