// A disk that is soon full, for one test.
#pragma once

#include <sched.h>
#include <sys/mount.h>

#include "../base/files.h"

namespace lockstep::testing {

class TinyDisk {
 public:
  // Only this process sees the mount, and it ends with the process, however that ends.
  explicit TinyDisk(const char* size) {
    const std::string options = std::string("size=") + size;
    mounted_ = ::unshare(CLONE_NEWNS) == 0 &&
               ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               ::mount("tmpfs", folder_.path().c_str(), "tmpfs", 0, options.c_str()) == 0;
  }
  ~TinyDisk() {
    if (mounted_) ::umount2(folder_.path().c_str(), MNT_DETACH);
  }
  TinyDisk(const TinyDisk&) = delete;
  TinyDisk& operator=(const TinyDisk&) = delete;

  // Mounting needs root's rights.
  bool mounted() const { return mounted_; }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / name; }

 private:
  TemporaryFolder folder_;
  bool mounted_ = false;
};

}  // namespace lockstep::testing
