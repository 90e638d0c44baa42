// The manifest of a checkpoint lists what it holds, with hashes: manifest.json, written last. Its
// tensors lie in pieces in safetensors files, each piece as some rank held it. A reader takes the
// elements that it needs from any of them, in any layout.
//
//   step-00000500/
//     shard-00000.safetensors   pieces that rank 0 wrote
//     shard-00001.safetensors   …
//     config.json, …            texts that the caller adds
//     manifest.json
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/safetensors/content_hash.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/mesh/placement/placement.h>

namespace lockstep::checkpoint {

// How far the data has been read: good for any number of ranks and any batch size.
struct DataPosition {
  std::int64_t epoch = 0;
  std::int64_t position = 0;  // samples that all ranks have had of the epoch's order
  std::int64_t size = 0;      // of the dataset: another one has another order

  bool operator==(const DataPosition&) const = default;
};

// The numbers that a run needs, beside its tensors, to continue as if it had never stopped.
struct TrainingState {
  std::int64_t step = 0;  // done so far
  DataPosition data = {};
  std::uint64_t seed = 0;
  std::int64_t samples_seen = 0;  // by all ranks, in all epochs
  std::optional<double> last_loss = {};
  // Other numbers that a resumed run needs, such as how many updates were made.
  std::map<std::string, double> values = {};
  std::string config = {};  // the run's resolved JSON, as it is

  bool operator==(const TrainingState&) const = default;
};

// As JSON, in one line. Every double comes back to the bit, also those that are no number.
// UsageError for texts that are no UTF-8.
std::string to_text(const TrainingState& state);

// UsageError that names `file` and the key for what is not such a text or lacks a key.
TrainingState parse_state(std::string_view text, const std::string& file);

// Reads the state from a place within a larger JSON text. UsageError as parse_state.
class JsonPlace;
TrainingState state_at(const JsonPlace& place);

// A checkpoint without it is not one.
inline constexpr const char* kManifestFile = "manifest.json";

// A piece has a hash for each stretch of this many bytes, so that a reader of a part can tell that
// the part is as it was written.
inline constexpr std::uint64_t kHashedBytes = 4 << 20;

// Something of a checkpoint is not as it was written. The text names the file and the tensor.
class DamagedCheckpoint : public UsageError {
 public:
  using UsageError::UsageError;
};

struct Piece {
  std::string file;
  // The elements of the tensor that the piece holds. The tensor may have been cut as another shape
  // with as many elements: [3, n, m] for a tensor [3·n, m].
  mesh::Placement placement = mesh::Placement::full({});
  std::vector<ContentHash> hashes = {};  // of each kHashedBytes; the last may be of fewer

  bool operator==(const Piece&) const = default;
};

struct TensorRecord {
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  // Some may hold the same elements.
  std::vector<Piece> pieces;

  bool operator==(const TensorRecord&) const = default;
};

struct FileRecord {
  std::uint64_t bytes = 0;
  // How many of its first bytes the hash is of: all, or those before the tensors'.
  std::uint64_t head_bytes = 0;
  ContentHash hash;

  bool operator==(const FileRecord&) const = default;
};

struct Manifest {
  TrainingState state;
  std::map<std::string, FileRecord> files;      // every file but the manifest itself
  std::map<std::string, TensorRecord> tensors;  // "model/fc.weight", "optimizer/exp_avg.fc.weight"

  bool operator==(const Manifest&) const = default;
};

// The name of a piece in its file: the tensor's name, and which part it is.
std::string piece_name(const std::string& tensor, const mesh::Placement& placement);
std::uint64_t piece_bytes(DType dtype, const mesh::Placement& placement);
// How many hashes it has.
std::uint64_t num_hashes(std::uint64_t bytes);

// Adds the files and tensors of one rank's manifest. UsageError where both have a file of the same
// name, or a tensor with another shape or type.
void add(Manifest& to, Manifest part);

// DamagedCheckpoint that names a tensor of which some elements are missing.
void check_complete(const Manifest& manifest, const std::string& file);

// Ends in the hash of all before it. Every double comes back to the bit. UsageError for texts that
// are no UTF-8.
std::string to_text(const Manifest& manifest);

// The text of a manifest, as far as its tensors, with the hash that closes it.
std::string seal_manifest(std::string_view body);

// DamagedCheckpoint that names `file` where the text was changed since it was written; UsageError
// that also names the key where the text has another version or makes no sense. Use
// CheckpointReader to read a checkpoint.
Manifest parse_manifest(std::string_view text, const std::string& file);

// How many elements of a tensor some piece holds; an element that several hold counts once.
// This is fast for thousands of pieces whose boxes are equal or apart, as in every layout. Throws
// DamagedCheckpoint where boxes overlap in more places than any writer makes.
std::int64_t covered_elements(const TensorRecord& tensor);

}  // namespace lockstep::checkpoint
