// Flipped bits, for every reader of a checkpoint: each reader finds the damage and names the file,
// or gives the same result as without it, because it does not use that bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <random>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/folder.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/models/folders/hugging_face_folder.h>
#include <lockstep/models/make_model.h>
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/train/language_model_task.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/train_language_model.h>

#include "../base/files.h"

namespace lockstep::train {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using lockstep::testing::TemporaryFolder;
using lockstep::testing::write_file;
using ::testing::HasSubstr;

std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.contiguous();
  return {static_cast<const char*>(values.data_ptr()), values.nbytes()};
}

// Overwrites a tensor, so that it is wrong if a reader does not load it.
void spoil(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  tensor.fill_(77);
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

  // Empty if everything is as it was written.
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

  // The model that `lockstep sample` and "model": {"from": …} load.
  std::string loaded_model(const fs::path& folder) const {
    for (const auto& [name, tensor] : weights_) spoil(tensor);
    const models::ModelConfig config = models::read_model_config(folder);
    if (config != model_) return "another model";
    load_weights(config, weights_, folder);
    std::string bytes;
    for (const auto& [name, tensor] : weights_) bytes += bytes_of(tensor);
    return bytes;
  }

  // The checks of the launcher, and then of every rank.
  std::string resume_checked() const {
    return fmt::format("{}", fmt::join(check_resume(config_, resolve_run(config_, 1)), "\n"));
  }
  std::string resumed() const {
    for (const mesh::HeldTensor& one : state_) spoil(one.values);
    const auto training =
        load_checkpoint(RankMessages(dist_.world()), checkpoint_, state_, LoadOptions{});
    std::string bytes = to_text(training);
    for (const mesh::HeldTensor& one : state_) bytes += bytes_of(one.values);
    return bytes;
  }

  // A Hugging Face folder with this model.
  fs::path exported_folder(const std::string& name, std::uint64_t largest_file) const {
    checkpoint::CheckpointReader reader(checkpoint_);
    models::export_to_hugging_face(reader, folder_ / name, {.largest_file = largest_file});
    return folder_ / name;
  }

  // Imports such a folder, as `ckpt import` does, and returns the bytes of the result.
  static std::string imported(const fs::path& folder) {
    const TemporaryFolder run;
    const fs::path checkpoint = models::import_from_hugging_face(folder, run.path());
    return read_file(checkpoint / "config.json") + read_file(checkpoint / "manifest.json") +
           read_file(checkpoint / "shard-00000.safetensors");
  }

  DistributedManager dist_ = setup_distributed();
  TemporaryFolder folder_;
  TrainConfig config_;
  fs::path checkpoint_, intact_;
  models::ModelConfig model_;
  std::vector<NamedTensor> weights_;
  std::vector<mesh::HeldTensor> state_;
};

struct Reader {
  const char* name;
  std::function<std::string()> read;
  std::string intact = {};
  int num_unused = 0;
};

// Numbers of a file's bits: all of them, or enough to cover every tensor and every part of a text.
std::vector<std::size_t> bits_of(const fs::path& file, bool all) {
  const std::size_t size = fs::file_size(file);
  std::vector<std::size_t> bits;
  if (all) {
    bits.resize(size * 8);
    std::iota(bits.begin(), bits.end(), 0);
    return bits;
  }
  std::mt19937 random(3);
  const auto add = [&](std::size_t byte) { bits.push_back(byte * 8 + random() % 8); };
  std::size_t texts_end = size;
  if (file.extension() == ".safetensors") {
    const checkpoint::SafetensorsFile tensors(file);
    texts_end = size - tensors.entries().back().end;
    for (const checkpoint::TensorEntry& entry : tensors.entries())
      for (const std::uint64_t at : {entry.begin, entry.end - 1}) add(texts_end + at);
  }
  for (std::size_t at = 0; at < texts_end; at += 1 + texts_end / 60) add(at);
  return bits;
}

// Flips bits of every file of the folder, one at a time. Each reader must give the same result as
// without the flip, or an error that names the file or, if it is about several files, their folder.
// Returns the number of bits.
enum class ErrorsName { the_file, the_folder };
int flip_each(const fs::path& folder, std::vector<Reader>& readers, bool all, ErrorsName errors,
              const std::vector<std::string>& files) {
  for (Reader& reader : readers) reader.intact = reader.read();
  int num_flips = 0;
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const std::string whole = read_file(entry.path());
    found.push_back(name);
    for (const std::size_t bit : bits_of(entry.path(), all)) {
      std::string flipped = whole;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      write_file(entry.path(), flipped);
      ++num_flips;
      for (Reader& reader : readers) {
        SCOPED_TRACE(
            fmt::format("{}: bit {} of byte {} of {}", reader.name, bit % 8, bit / 8, name));
        try {
          if (reader.read() == reader.intact)
            ++reader.num_unused;
          else
            ADD_FAILURE() << "another result, and no word of it";
        } catch (const UsageError& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr(errors == ErrorsName::the_file ? name : folder.string()));
        }
      }
      if (::testing::Test::HasFailure()) return num_flips;
    }
    write_file(entry.path(), whole);
  }
  for (const Reader& reader : readers) EXPECT_EQ(reader.read(), reader.intact) << reader.name;
  EXPECT_THAT(found, ::testing::UnorderedElementsAreArray(files));
  return num_flips;
}

// All readers of a checkpoint, and all readers of an exported model.
class EveryReader : public FlippedBits, public ::testing::WithParamInterface<bool> {};

TEST_P(EveryReader, OfACheckpoint) {
  // verify() throws the damage that it finds, as the other readers do.
  const auto verified = [&] {
    if (const std::string damages = verify(); !damages.empty()) throw UsageError("{}", damages);
    return std::string();
  };
  std::vector<Reader> readers = {
      {"verify", verified},
      {"export", [&] { return exported(); }},
      {"diff", [&] { return diff(); }},
      {"sample and model.from", [&] { return loaded_model(checkpoint_); }},
      {"resume, before ranks start", [&] { return resume_checked(); }},
      {"resume, on a rank", [&] { return resumed(); }}};
  const int num_flips =
      flip_each(checkpoint_, readers, GetParam(), ErrorsName::the_file,
                {"config.json", "data.json", "manifest.json", "shard-00000.safetensors"});
  EXPECT_GT(num_flips, 250);
  EXPECT_EQ(readers[0].num_unused, 0);
  // A rank reads everything except config.json and data.json, which the launcher uses.
  for (const Reader& reader : readers) EXPECT_LT(reader.num_unused, num_flips / 2) << reader.name;
}

TEST_P(EveryReader, OfAnExportedModel) {
  struct Export {
    const char* name;
    std::uint64_t largest_file;
    std::vector<std::string> files;
  };
  for (const Export& one :
       {Export{"whole", 1'000'000, {"config.json", "lockstep-hashes.json", "model.safetensors"}},
        Export{"cut",
               1000,
               {"config.json", "lockstep-hashes.json", "model-00001-of-00002.safetensors",
                "model-00002-of-00002.safetensors", "model.safetensors.index.json"}}}) {
    const fs::path folder = exported_folder(one.name, one.largest_file);
    std::vector<Reader> readers = {{"import", [&] { return imported(folder); }},
                                   {"sample and model.from", [&] { return loaded_model(folder); }}};
    const int num_flips = flip_each(folder, readers, GetParam(), ErrorsName::the_folder, one.files);
    EXPECT_GT(num_flips, 150);
    // Readers do not use the format's name in the tensors' header, or the size in the index.
    for (const Reader& reader : readers) EXPECT_LT(reader.num_unused, num_flips / 5) << reader.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Flipped, EveryReader, ::testing::Values(false));
INSTANTIATE_TEST_SUITE_P(WholeFlipped, EveryReader, ::testing::Values(true));

}  // namespace
}  // namespace lockstep::train
