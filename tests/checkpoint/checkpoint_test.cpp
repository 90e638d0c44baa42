#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/generators.h>

#include "../base/errors.h"
#include "../base/files.h"
#include "tiny_disk.h"

namespace lockstep::checkpoint {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::UnorderedElementsAre;

class SavedCheckpoint : public ::testing::Test {
 protected:
  CheckpointContents contents(std::int64_t step) const {
    CheckpointContents result{.model = model, .optimizer = optimizer};
    result.state.step = step;
    result.state.last_loss = 0.1 + static_cast<double>(step);
    result.state.generators = generator_states(at::kCPU);
    result.state.generators["rank1/cpu"] = {std::byte{1}, std::byte{2}};
    result.files = {{"config.json", "{\"model_type\": \"gpt2\"}"}};
    return result;
  }

  const TemporaryFolder folder;
  const std::vector<NamedTensor> model = {{"weight", at::randn({3, 2})}, {"bias", at::randn({3})}};
  const std::vector<NamedTensor> optimizer = {{"weight.exp_avg", at::randn({3, 2})},
                                              {"step", at::full({}, 7, at::kLong)}};
  const std::vector<NamedTensor> new_model = {{"weight", at::zeros({3, 2})},
                                              {"bias", at::zeros({3})}};
  const std::vector<NamedTensor> new_optimizer = {{"weight.exp_avg", at::zeros({3, 2})},
                                                  {"step", at::zeros({}, at::kLong)}};
};

TEST_F(SavedCheckpoint, ComesBackWhole) {
  const CheckpointContents saved = contents(500);
  const auto path = save_checkpoint(folder / "run", saved);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path))
    names.push_back(entry.path().filename().string());
  EXPECT_THAT(names, UnorderedElementsAre("model.safetensors", "optimizer.safetensors",
                                          "rng.safetensors", "config.json", "state.json"));
  EXPECT_EQ(testing::read_file(path / "config.json"), saved.files.at("config.json"));
  ASSERT_EQ(newest_checkpoint(folder / "run")->path, path);
  EXPECT_EQ(load_state(path), saved.state);
  EXPECT_EQ(load_checkpoint(path, new_model, new_optimizer), saved.state);
  for (std::size_t i = 0; i < model.size(); ++i) {
    EXPECT_TRUE(at::equal(new_model[i].tensor, model[i].tensor));
    EXPECT_TRUE(at::equal(new_optimizer[i].tensor, optimizer[i].tensor));
  }
}

TEST_F(SavedCheckpoint, GeneratorsDrawWhatTheyWouldHaveDrawn) {
  at::randn({7});  // leaves a half-used pair of normal numbers behind
  const auto path = save_checkpoint(folder / "run", contents(1));
  const at::Tensor expected = at::randn({100});
  at::randn({11});
  restore_generators(load_state(path).generators, at::kCPU);
  EXPECT_TRUE(at::equal(at::randn({100}), expected));
  EXPECT_THAT(usage_error([&] {
                restore_generators({{"cpu", {std::byte{1}}}}, at::kCPU);
              }),
              HasSubstr("generator 'cpu' (1 bytes)"));
}

TEST(Generators, OfAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this LibTorch has no CUDA";
  const at::Device device(at::kCUDA, 0);
  at::randn({7}, device);
  const GeneratorStates states = generator_states(device);
  const at::Tensor expected = at::randn({100}, device);
  const at::Tensor on_host = at::randn({100});
  restore_generators(states, device);
  EXPECT_TRUE(at::equal(at::randn({100}, device), expected));
  EXPECT_TRUE(at::equal(at::randn({100}), on_host));
}

TEST_F(SavedCheckpoint, OfAnotherModelTouchesNothing) {
  const auto path = save_checkpoint(folder / "run", contents(1));
  const std::vector<NamedTensor> larger = {{"weight", at::zeros({3, 5})}, {"bias", at::zeros({3})}};
  EXPECT_THAT(usage_error([&] { load_checkpoint(path, larger, new_optimizer); }),
              HasSubstr("'weight' is [3, 2] in the file and [3, 5] in the model"));
  EXPECT_EQ(new_optimizer[1].tensor.item<std::int64_t>(), 0) << "the optimizer was loaded";
  const std::vector<NamedTensor> other = {{"momentum", at::zeros({3, 2})}};
  EXPECT_THAT(usage_error([&] { load_checkpoint(path, new_model, other); }),
              AllOf(HasSubstr("optimizer.safetensors"), HasSubstr("'momentum'")));
  EXPECT_EQ(new_model[0].tensor.abs().sum().item<float>(), 0) << "the model was loaded";
}

TEST_F(SavedCheckpoint, AFlippedBitIsFound) {
  const auto path = save_checkpoint(folder / "run", contents(1));
  std::string bytes = testing::read_file(path / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::write_file(path / "model.safetensors", bytes);
  EXPECT_THAT(usage_error([&] { load_checkpoint(path, new_model, new_optimizer); }),
              AllOf(HasSubstr(path.string()), HasSubstr("'model.safetensors' has the checksum")));
}

TEST_F(SavedCheckpoint, WithoutAnOptimizer) {
  CheckpointContents saved = contents(1);
  saved.optimizer = {};
  const auto path = save_checkpoint(folder / "run", saved);
  EXPECT_FALSE(exists(path / "optimizer.safetensors"));
  EXPECT_EQ(load_checkpoint(path, new_model, {}), saved.state);
  EXPECT_THAT(usage_error([&] { load_checkpoint(path, new_model, new_optimizer); }),
              HasSubstr("optimizer.safetensors"));
}

TEST_F(SavedCheckpoint, FileNamesThatAreTakenOrLeadOutAreRefused) {
  for (const char* name : {"state.json", "model.safetensors", "../config.json", "", ".", "a/b"}) {
    CheckpointContents saved = contents(1);
    saved.files = {{name, "text"}};
    EXPECT_THAT(usage_error([&] { save_checkpoint(folder / "run", saved); }),
                HasSubstr("cannot be added to a checkpoint"))
        << name;
  }
  EXPECT_FALSE(exists(folder / "run"));
}

TEST_F(SavedCheckpoint, AFullDiskLeavesTheOlderOnes) {
  const testing::TinyDisk disk("256k");
  if (!disk.mounted()) GTEST_SKIP() << "mounting a disk needs root";
  const std::vector<NamedTensor> large = {{"weight", at::randn({100, 100})}};
  CheckpointContents saved = contents(1);
  saved.model = large;
  const auto path = save_checkpoint(disk / "run", saved);
  const std::vector<NamedTensor> larger = {{"weight", at::randn({300, 200})}};
  saved.state.step = 2;
  saved.model = larger;
  try {
    save_checkpoint(disk / "run", saved);
    FAIL() << "a full disk took a checkpoint";
  } catch (const FileError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("not enough room in"), HasSubstr("are free")));
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(disk / "run"), {}), 1);
  EXPECT_EQ(load_state(newest_checkpoint(disk / "run")->path).step, 1);
}

}  // namespace
}  // namespace lockstep::checkpoint
