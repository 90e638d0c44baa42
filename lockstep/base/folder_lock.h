// One writer at a time for a folder.
#pragma once

#include <filesystem>

namespace lockstep {

// Holds a folder's lock (flock) from here to the end of its life. A process that ends, however it
// does, gives up its locks.
//
// Ownership: of a descriptor of the folder. Threading: any, one at a time. Failure: UsageError,
// with the process that is in the way where the system tells, if another FolderLock holds the
// folder, in this process or in another; FileError where there is no such folder. A file system
// without such locks (some network ones) keeps nobody apart and is no failure: the caller must see
// to it.
class FolderLock {
 public:
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&&) = delete;

 private:
  int fd_ = -1;  // none where the file system has no locks
};

}  // namespace lockstep
