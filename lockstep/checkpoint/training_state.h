// What a run must know, beside its tensors, to continue as if it had never stopped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::checkpoint {

// How far the data has been read: good for any number of ranks and any batch size.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // samples that all ranks have had of the epoch's order
  std::int64_t size = 0;      // of the dataset: another one has another order

  bool operator==(const DataPosition&) const = default;
};

struct TrainingState {
  std::int64_t step = 0;  // done so far
  DataPosition data = {};
  std::uint64_t seed = 0;
  std::int64_t samples_seen = 0;  // by all ranks, in all epochs
  std::optional<double> last_loss = {};
  std::map<std::string, double> values =
      {};                   // whatever else has to go on: how many updates were made
  std::string config = {};  // the run's resolved JSON, as it is
  // The bytes of random number generators: "cpu", "cuda" (generators.h), and whatever else the
  // caller has, such as "rank1/cpu". Kept beside state.json, in rng.safetensors.
  std::map<std::string, std::vector<std::byte>> generators = {};

  bool operator==(const TrainingState&) const = default;
};

// A file of a checkpoint as it was written.
struct FileRecord {
  std::uint64_t bytes = 0;
  std::uint32_t crc32c = 0;

  bool operator==(const FileRecord&) const = default;
};
using FileRecords = std::map<std::string, FileRecord>;

// What state.json holds: the state without the generators, and the other files of the checkpoint.
struct StateFile {
  TrainingState state;
  FileRecords files;

  bool operator==(const StateFile&) const = default;
};

// Every double comes back to the bit, also those that are no number. UsageError for texts that are
// no UTF-8.
std::string to_text(const StateFile& file);

// UsageError that names `file` and the key for what is not such a text, is of another version, or
// lacks a key.
StateFile parse_state(std::string_view text, const std::string& file);

// The same of a file.
StateFile read_state(const std::filesystem::path& path);

// Of every file in a folder but state.json. UsageError where one cannot be read.
FileRecords record_files(const std::filesystem::path& folder);

// UsageError that names the files of `folder` that are missing or not as they were recorded: a disk
// that lost a bit, a copy that was cut short.
void verify_files(const std::filesystem::path& folder, const FileRecords& files);

}  // namespace lockstep::checkpoint
