// One writer at a time for a folder.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

// A job that holds a folder, and may be formed anew while a process of it hangs that held the
// folder before.
struct FolderHolder {
  std::string job;  // all generations of a job have the same, and no other job has it
  int generation = 0;
};

// Holds a folder's lock (flock) from here to the end of its life. A process that ends, however it
// does, gives up its locks.
//
// One that hangs, or whose host is gone, does not: so a holder that is a generation of a job takes
// the folder over from an earlier generation of the same job, at once. It notes itself in a file
// there, `.holder`, which it holds a lock of as well and which is never written to, only replaced:
// by it the earlier one knows, should it wake up, that the folder is not its own any more.
//
// Ownership: of descriptors of the folder and of the file. Threading: any, one at a time; check()
// any. Failure: CommError (aborted) where a later generation of the job has the folder: this one is
// over; UsageError, with the process that is in the way where the system tells, if another
// FolderLock holds the folder, in this process or in another; FileError where there is no such
// folder, or the file cannot be written. A file system without such locks (some network ones) keeps
// nobody apart and is no failure: the caller must see to it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder,
                      const std::optional<FolderHolder>& holder = std::nullopt);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

  // For before each thing that is written: CommError (aborted) where a later generation has taken
  // the folder over. A folder that cannot be looked at has not been.
  void check() const;

 private:
  bool note(const FolderHolder& holder, int looked_at);

  std::filesystem::path folder_;
  int fd_ = -1;    // none where the file system has no locks
  int note_ = -1;  // the file's, of a holder
};

}  // namespace lockstep
