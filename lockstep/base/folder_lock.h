// Locks a folder for one writer at a time.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace lockstep {

// The generation of a job that holds a folder. The job may be formed anew while a process of an
// earlier generation hangs and still holds the folder.
struct FolderHolder {
  std::string job;  // all generations of a job have the same, and no other job has it
  int generation = 0;
};

// Holds a folder's lock (flock) from here to the end of its life. A process that ends, however it
// does, gives up its locks.
//
// A process that hangs, or whose host is gone, keeps them. Therefore a generation of a job takes
// the folder over from an earlier generation of the same job, at once. It writes its name to a file
// in the folder, `.holder`, and locks that too. The file is never changed, only replaced: an
// earlier generation that wakes up sees by it that the folder is no longer its own.
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

  // Call this before each write. Throws a CommError (aborted) where a later generation has taken
  // the folder over. A folder that cannot be looked at counts as still held.
  void check() const;

 private:
  bool note(const FolderHolder& holder, int looked_at);

  std::filesystem::path folder_;
  int fd_ = -1;    // none where the file system has no locks
  int note_ = -1;  // the file's, of a holder
};

}  // namespace lockstep
