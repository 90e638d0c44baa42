// Reads a checkpoint: any part of any tensor, whatever pieces it was written in, and never a
// damaged byte. There is no other way to read a file of a checkpoint: a CheckpointReader gives
// config.json, tensors and the manifest, compares each byte with the manifest's hashes, and the
// manifest with its own hash.
//
//   CheckpointReader reader(folder);
//   reader.read("model/fc.weight", Placement::full({4, 8}).cut_flat(0, 2), DType::f32, bytes);
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/safetensors/header.h>
#include <lockstep/mesh/placement/read_plan.h>

namespace lockstep::checkpoint {

// A tensor as it was saved.
struct SavedTensor {
  const std::string& name;
  const std::vector<std::int64_t>& shape;
};

// Plans which pieces of a tensor, in files or in memory, fill the wanted part of it. The holders of
// the reads are the pieces, by index; reads are sorted by holder, so that neighbouring bytes are
// read once. `reader` is that of mesh::ReadOptions. Pieces may overlap, and may have been cut from
// another shape with the same number of elements.
//
// Throws a UsageError where pieces and `wanted` are cut along dims of different shapes, or where no
// piece has some of the wanted elements.
std::vector<mesh::Read> plan_piece_reads(const SavedTensor& tensor,
                                         std::vector<mesh::Placement> pieces,
                                         mesh::Placement wanted, int reader);

// Ownership: keeps files open that it has read from. Threading: one thread, which starts others for
// as long as a call lasts; several readers may read one checkpoint. Failure: DamagedCheckpoint,
// with the file and the tensor, where something is missing or was changed, also for a folder that
// is_checkpoint() but has lost its manifest; UsageError for a path without a checkpoint, and for
// tensors that the checkpoint does not have or has in another shape or type.
class CheckpointReader {
 public:
  // `reader` is the number of this reader among the ones that read the checkpoint at once. Where
  // several files hold the same elements, different readers begin with different files.
  explicit CheckpointReader(std::filesystem::path checkpoint, int reader = 0);
  CheckpointReader(const CheckpointReader&) = delete;
  CheckpointReader& operator=(const CheckpointReader&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Nothing where there is none of that name.
  const TensorRecord* find(const std::string& tensor) const;

  // Fills `into` with the elements of the tensor that the placement names, in its order. It reads
  // these bytes of the files, rounded up to whole stretches, each of which has a hash.
  void read(const std::string& tensor, const mesh::Placement& placement, std::span<std::byte> into);

  // Reads parts of many tensors at once, on all usable cores.
  struct Wanted {
    std::string tensor;
    mesh::Placement placement;
    std::span<std::byte> into;
  };
  void read(std::span<const Wanted> all);

  // A text beside the tensors, each byte as it was written.
  std::string read_text_file(const std::string& file);

  // DamagedCheckpoint where a tensor's pieces are not all of it, or a file is not there, or not as
  // large as it was, or does not begin as it did: all that can be known without reading everything.
  // Readers that share the work each check every `stride`-th file.
  void check_files(int stride = 1);

  // Bytes read from all files so far.
  std::uint64_t bytes_read() const { return bytes_read_; }

  // Reads everything and returns a sentence for each damage; none where all is as it was written.
  std::vector<std::string> damages();

 private:
  struct OpenFile {
    RegularFile file;
    SafetensorsHeader header;
  };
  // Where a piece's bytes are.
  struct Source {
    int fd = -1;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    const Piece* piece = nullptr;
    const std::string* tensor = nullptr;
  };

  const OpenFile& open(const std::string& file);
  Manifest read_manifest();
  // Without its contents. DamagedCheckpoint where there is no such file.
  RegularFile open_unread(const std::string& file) const;
  // Reads the first bytes, for which the manifest has a hash.
  std::string read_head(const RegularFile& opened, const std::string& file);
  Source source_of(const std::string& tensor, const TensorRecord& record, const Piece& piece);
  void read_bytes(int fd, const std::string& file, std::uint64_t offset, std::span<std::byte> into);
  // A stretch that has a hash of its own and is wanted as a whole.
  struct Stretch {
    Source source;
    std::uint64_t index = 0;
    std::span<std::byte> into;
  };
  void read_stretch(const Stretch& stretch);
  void read_stretches(const std::vector<Stretch>& stretches);
  // Reads the stretches that are wanted in part, and adds those that are wanted whole to `whole`.
  void read_parts(const Wanted& wanted, std::vector<Stretch>& whole);
  // The bytes [begin, begin + into.size()) of the piece.
  void read_part(const Source& source, std::uint64_t begin, std::span<std::byte> into,
                 std::vector<Stretch>& whole);
  [[noreturn]] void fail(const std::string& file, const std::string& what) const;

  std::filesystem::path path_;
  int reader_;
  int num_threads_;
  Manifest manifest_;
  std::map<std::string, OpenFile> files_;
  std::atomic<std::uint64_t> bytes_read_ = 0;
  // The stretch that was read last, where only a part of it was asked for.
  std::vector<std::byte> stretch_;
  const Piece* stretch_piece_ = nullptr;
  std::uint64_t stretch_index_ = 0;
};

// The newest of a run's checkpoints, or of the given ones (ascending by step), that passes
// check_files(); and what is wrong with newer ones, newest first.
struct UsableCheckpoint {
  std::optional<Checkpoint> checkpoint;
  std::vector<std::string> damages;
};
UsableCheckpoint newest_usable(const std::filesystem::path& run_folder);
UsableCheckpoint newest_usable(std::vector<Checkpoint> all);

// How a tensor of two checkpoints differs, whatever pieces each lies in.
struct TensorDifference {
  enum class Kind {
    only_in_first,
    only_in_second,
    another_form,  // of another shape or type
    other_values,
  };

  std::string name;
  Kind kind = Kind::other_values;
  // Set for other_values only: how many elements there are, and how many differ by a bit or more.
  std::int64_t elements = 0;
  std::int64_t differing = 0;
  // The largest difference of floating-point numbers; nothing where one of a pair is no number.
  std::optional<double> largest;
};

// Calls `visit` for each tensor that differs, in the order of names. Reads a stretch at a time.
// Failure: as CheckpointReader.
void compare(CheckpointReader& first, CheckpointReader& second,
             const std::function<void(const TensorDifference&)>& visit);

}  // namespace lockstep::checkpoint
