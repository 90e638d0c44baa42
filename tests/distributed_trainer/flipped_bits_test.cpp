// Bits that are other ones than were saved, for everyone who reads a checkpoint: each reader finds
// the damage and names the file, or gives what it gives without it, as it has no use for that bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/checkpoint/compare.h>
#include <lockstep/checkpoint/reader.h>
#include <lockstep/checkpoint/safetensors.h>
#include <lockstep/checkpoint/scalar_type.h>
#include <lockstep/models/hugging_face_folder.h>
#include <lockstep/models/make_model.h>
#include <lockstep/train/language_model_task.h>
#include <lockstep/train/plan.h>
#include <lockstep/train/resume_check.h>
#include <lockstep/train/train_language_model.h>

#include "../base/files.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  return {static_cast<const char*>(values.data_ptr()), values.nbytes()};
}

// A tiny GPT, trained for two steps with AdamW, and each reader of its checkpoint.
class FlippedBits : public ::testing::Test {
 protected:
  FlippedBits() {
    std::string tokens;
    for (int i = 0; i < 64; ++i) tokens += {static_cast<char>(i * 5 % 8), '\0'};
    write_file(folder_ / "tokens.bin", tokens);
    config_ = parse_config(
        R"({"model": {"family": "gpt2", "vocab_size": 8, "hidden_size": 4, "num_layers": 1,
                      "num_heads": 2},
            "data": {"train": "tokens.bin", "sequence_length": 4}, "train_batch_size": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "max_steps": 2, "output": "run", "device": "cpu", "threads_per_rank": 1,
            "tensorboard": {"enabled": false}})",
        {.folder = folder_.path()});
    checkpoint_ = train_language_model(config_, -1, nullptr).checkpoint;
    intact_ = folder_ / "intact";
    fs::copy(checkpoint_, intact_);
    model_ = models::read_model_config(intact_);
    for (const auto& item : models::make_model(model_, 0)->named_parameters())
      weights_.push_back({item.key(), item.value().detach()});
    checkpoint::CheckpointReader reader(intact_);
    for (const auto& [name, record] : reader.manifest().tensors)
      state_.push_back(mesh::whole_tensor(
          name, at::empty(record.shape, *checkpoint::scalar_type_of(record.dtype))));
  }

  // Nothing where everything is as it was written.
  std::string verify() const {
    return fmt::format("{}", fmt::join(checkpoint::CheckpointReader(checkpoint_).damages(), "\n"));
  }

  std::string exported() const {
    const TemporaryFolder to;
    checkpoint::CheckpointReader reader(checkpoint_);
    models::export_to_hugging_face(reader, to / "model");
    return read_file(to / "model/config.json") + read_file(to / "model/model.safetensors");
  }

  std::string diff() const {
    checkpoint::CheckpointReader first(checkpoint_), second(intact_);
    std::string differences;
    compare(first, second, [&](const auto& difference) { differences += difference.name + ' '; });
    return differences;
  }

  // What `lockstep sample` and "model": {"from": …} make of it.
  std::string loaded_model() const {
    const models::ModelConfig config = models::read_model_config(checkpoint_);
    if (config != model_) return "another model";
    load_weights(config, weights_, checkpoint_);
    std::string bytes;
    for (const auto& [name, tensor] : weights_) bytes += bytes_of(tensor);
    return bytes;
  }

  // What the launcher looks at, and then every rank.
  std::string resume_checked() const {
    return fmt::format("{}", fmt::join(check_resume(config_, plan_run(config_, 1)), "\n"));
  }
  std::string resumed() const {
    const auto training = load_checkpoint(RankMessages(dist_.world(), dist_.device()), checkpoint_,
                                          state_, LoadOptions{});
    std::string bytes = to_text(training);
    for (const mesh::HeldTensor& one : state_) bytes += bytes_of(one.values);
    return bytes;
  }

  // Of a file, so many that every tensor, and all of a text, is among them.
  static std::vector<std::size_t> places_in(const fs::path& file) {
    const std::size_t size = fs::file_size(file);
    std::size_t texts_end = size;
    std::vector<std::size_t> places;
    if (file.extension() == ".safetensors") {
      const checkpoint::SafetensorsFile tensors(file);
      texts_end = size - tensors.entries().back().end;
      for (const checkpoint::TensorEntry& entry : tensors.entries())
        for (const std::uint64_t at : {entry.begin, entry.end - 1})
          places.push_back(texts_end + at);
    }
    for (std::size_t at = 0; at < texts_end; at += 1 + texts_end / 60) places.push_back(at);
    return places;
  }

  DistributedManager dist_ = setup_distributed();
  TemporaryFolder folder_;
  TrainConfig config_;
  fs::path checkpoint_, intact_;
  models::ModelConfig model_;
  std::vector<NamedTensor> weights_;
  std::vector<mesh::HeldTensor> state_;
};

TEST_F(FlippedBits, AreFoundOrUnusedByEveryReader) {
  struct Reader {
    const char* name;
    std::function<std::string()> read;
    std::string intact = {};
    int num_unused = 0;
  };
  std::vector<Reader> readers = {{"verify", [&] { return verify(); }},
                                 {"export", [&] { return exported(); }},
                                 {"diff", [&] { return diff(); }},
                                 {"sample and model.from", [&] { return loaded_model(); }},
                                 {"resume, before ranks start", [&] { return resume_checked(); }},
                                 {"resume, on a rank", [&] { return resumed(); }}};
  for (Reader& reader : readers) reader.intact = reader.read();
  EXPECT_THAT(readers[0].intact, IsEmpty());
  std::mt19937 random(3);
  int num_flips = 0;
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(checkpoint_)) {
    const std::string name = entry.path().filename().string();
    const std::string whole = read_file(entry.path());
    files.insert(name);
    for (const std::size_t at : places_in(entry.path())) {
      std::string flipped = whole;
      flipped[at] = static_cast<char>(flipped[at] ^ (1 << random() % 8));
      write_file(entry.path(), flipped);
      ++num_flips;
      for (Reader& reader : readers) {
        SCOPED_TRACE(fmt::format("{}: byte {} of {}", reader.name, at, name));
        try {
          const std::string result = reader.read();
          ++reader.num_unused;
          if (&reader == &readers[0])
            ASSERT_THAT(result, HasSubstr(name)) << "not found";
          else
            ASSERT_TRUE(result == reader.intact) << "another result, and no word of it";
        } catch (const UsageError& error) {
          ASSERT_THAT(error.what(), HasSubstr(name));
        }
      }
    }
    write_file(entry.path(), whole);
  }
  EXPECT_THAT(files, ::testing::ElementsAre("config.json", "data.json", "manifest.json",
                                            "shard-00000.safetensors"));
  EXPECT_GT(num_flips, 250);
  // A rank reads all but config.json's and data.json's use, which are the launcher's.
  for (const Reader& reader : readers)
    if (&reader != &readers[0]) {
      EXPECT_LT(reader.num_unused, num_flips / 2) << reader.name;
    }
  for (const Reader& reader : readers) EXPECT_EQ(reader.read(), reader.intact) << reader.name;
}

}  // namespace
}  // namespace lockstep::train
