// The checkpoints of a run: folders step-00000500 inside its checkpoint folder, each complete or
// not there.
//
//   CheckpointWriter writer(run_folder, 500);
//   … files in writer.path(), manifest.json last …
//   writer.commit();
//   remove_old(run_folder, 3);
//
// While a checkpoint is written it is called .step-00000500.part-<writer>; one that is being
// replaced waits as .step-00000500.old-<writer> until its successor has the name. A writer that is
// killed leaves every older checkpoint as it was; the next writer removes its half-written folder,
// which is never listed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/manifest.h>

namespace lockstep::checkpoint {

// "step-00000500"
std::string checkpoint_name(std::int64_t step);

struct Checkpoint {
  std::int64_t step = 0;
  std::filesystem::path path;

  bool operator==(const Checkpoint&) const = default;
};

// Whether a folder is a checkpoint, damaged or not: it has a manifest, or its name or other files
// tell that it had one.
bool is_checkpoint(const std::filesystem::path& folder);

// The checkpoints that were completed, ascending by step; none where the folder does not exist. One
// that has lost its manifest since is listed too: opening it reports the damage. UsageError where
// the folder cannot be read.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& run_folder);

std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& run_folder);

// Renames a damaged checkpoint to "damaged-step-00000500", so that it is no longer listed but can
// still be looked at. Returns the new path. FileError where it cannot be renamed.
std::filesystem::path set_aside(const Checkpoint& checkpoint);

// The checkpoints that were set aside, ascending by step.
std::vector<Checkpoint> list_set_aside(const std::filesystem::path& run_folder);

// Removes all but the newest `keep_last` checkpoints with a manifest (0 keeps all), and returns the
// removed ones. Call it after a commit, when a newer one is safe. FileError where one cannot be
// removed.
std::vector<Checkpoint> remove_old(const std::filesystem::path& run_folder, int keep_last);

// One checkpoint while it is written.
//
// Ownership: owns a folder, which it removes when it is dropped without commit(). A run's folder
// has one writer at a time: a second is a UsageError, as with FolderLock. A caller that already
// holds the folder's lock passes it; where a later generation has taken that lock over, nothing is
// touched and commit() throws a FileError. Threading: one thread; others may write files into
// path(). Failure: FileError for the disk; the folder's earlier checkpoints stay.
class CheckpointWriter {
 public:
  // Makes `run_folder` where it does not exist, and removes what killed writers left in it; warns
  // where something cannot be removed.
  CheckpointWriter(std::filesystem::path run_folder, std::int64_t step,
                   std::shared_ptr<const FolderLock> lock = nullptr);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Where the files go until commit().
  const std::filesystem::path& path() const { return part_; }

  // Syncs the folder, whose files are on disk already (DurableFile), and gives it its final name,
  // in place of a checkpoint of the same step. Returns its path. UsageError where it has no
  // manifest.json.
  std::filesystem::path commit();

 private:
  std::filesystem::path run_folder_;
  std::int64_t step_;
  std::filesystem::path part_;
  std::shared_ptr<const FolderLock> lock_;
};

}  // namespace lockstep::checkpoint
