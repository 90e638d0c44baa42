// A disk that stalls for a while, for one test: every change on it waits.
#pragma once

#include <fcntl.h>
#include <linux/fs.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "../base/files.h"

namespace lockstep::testing {

class StallingDisk {
 public:
  // Only this process sees the mount, and it ends with the process, however that ends.
  StallingDisk() {
    const std::string image = folder_ / "image", disk = folder_ / "disk";
    std::filesystem::create_directory(disk);
    mounted_ = ::unshare(CLONE_NEWNS) == 0 &&
               ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
               run("truncate -s 32M " + image) && run("mkfs.ext4 -q " + image) &&
               run("mount -o loop " + image + " " + disk);
    if (!mounted_) return;
    fd_ = ::open(disk.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (stall())
      go_on();
    else
      stalls_ = false;
  }
  ~StallingDisk() {
    if (!mounted_) return;
    go_on();
    ::close(fd_);
    ::umount2((folder_ / "disk").c_str(), MNT_DETACH);
  }
  StallingDisk(const StallingDisk&) = delete;
  StallingDisk& operator=(const StallingDisk&) = delete;

  // Mounting needs root's rights, ext4 and a loop device.
  bool usable() const { return mounted_ && stalls_; }
  std::filesystem::path operator/(const std::string& name) const { return folder_ / "disk" / name; }

  bool stall() const { return ::ioctl(fd_, FIFREEZE, 0) == 0; }
  bool go_on() const { return ::ioctl(fd_, FITHAW, 0) == 0; }

 private:
  static bool run(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

  TemporaryFolder folder_;
  bool mounted_ = false;
  bool stalls_ = true;
  int fd_ = -1;
};

}  // namespace lockstep::testing
