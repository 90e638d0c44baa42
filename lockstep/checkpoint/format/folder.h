// The checkpoints of a run: folders step-00000500 inside its checkpoint folder, each complete or
// not there.
//
//   CheckpointWriter writer(run_folder, 500);
//   … files in writer.path(), manifest.json last …
//   writer.commit();
//   remove_old(run_folder, 3);
//
// While a checkpoint is written it is called .step-00000500.part-<writer>; one that is being
// replaced waits as .step-00000500.old-<writer> until its successor has the name. Killed at any
// moment, a writer leaves every older checkpoint as it was, and what it left half-done is not
// listed and is removed by the next writer.
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

// Whether a folder is a checkpoint, damaged or not: it has a manifest, or has lost it, which its
// name or the files that are left tell.
bool is_checkpoint(const std::filesystem::path& folder);

// Those that got their name, ascending by step; none where the folder does not exist. All were
// complete then: one that lacks its manifest has lost it since, and is listed as it is, for whoever
// opens it to say so. UsageError where the folder cannot be read.
std::vector<Checkpoint> list_checkpoints(const std::filesystem::path& run_folder);

std::optional<Checkpoint> newest_checkpoint(const std::filesystem::path& run_folder);

// Gives a damaged one another name, beside those that are listed: "damaged-step-00000500", where it
// can be looked at. Returns that. FileError where it cannot be renamed.
std::filesystem::path set_aside(const Checkpoint& checkpoint);

// Those that were set aside, ascending by step.
std::vector<Checkpoint> list_set_aside(const std::filesystem::path& run_folder);

// Removes all but the newest `keep_last` with a manifest (0 keeps all) and returns those. For after
// a commit, when a newer one is safe. FileError where one cannot be removed.
std::vector<Checkpoint> remove_old(const std::filesystem::path& run_folder, int keep_last);

// One checkpoint while it is written.
//
// Ownership: of a folder that is removed when the writer is dropped without commit(). One writer at
// a time for a run's folder: a second is a UsageError, as FolderLock has it. Who holds a lock that
// keeps others out of the folder gives it: then that one counts, and where a later generation has
// taken it over nothing is touched, which is a FileError. Threading: one thread; others may write
// files into path(). Failure: FileError for the disk; what was there before stays.
class CheckpointWriter {
 public:
  // Makes `run_folder` where it does not exist, and removes what killed writers left in it; of what
  // cannot be removed it warns.
  CheckpointWriter(std::filesystem::path run_folder, std::int64_t step,
                   std::shared_ptr<const FolderLock> lock = nullptr);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Where the files go until commit().
  const std::filesystem::path& path() const { return part_; }

  // Puts the names of its files, each of which is on disk already (DurableFile), on disk as well,
  // and gives the folder its own, in place of a checkpoint of the same step. Returns where it is.
  // UsageError where it has no manifest.json.
  std::filesystem::path commit();

 private:
  std::filesystem::path run_folder_;
  std::int64_t step_;
  std::filesystem::path part_;
  std::shared_ptr<const FolderLock> lock_;
};

}  // namespace lockstep::checkpoint
