#include <lockstep/base/folder_lock.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <lockstep/base/durable_file.h>

namespace lockstep {

namespace {

// Whoever only looks whether a folder is free holds it for a moment.
constexpr int kAttempts = 4;
constexpr std::chrono::milliseconds kBetweenAttempts(25);

// " (process 4711)", or nothing where the system does not say. A line of /proc/locks is
// "2: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"; some file systems have another device there
// than in stat(), so that the inode alone decides.
std::string holder(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return "";
  std::ifstream locks("/proc/locks");
  std::string line, number, kind, mode, access, process, file;
  while (std::getline(locks, line)) {
    if (!(std::istringstream(line) >> number >> kind >> mode >> access >> process >> file))
      continue;
    const std::string inode = ":" + std::to_string(info.st_ino);
    if (kind == "FLOCK" && file.ends_with(inode)) return " (process " + process + ")";
  }
  return "";
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) throw FileError("cannot open '{}': {}", folder.string(), std::strerror(errno));
  for (int attempt = 1;; ++attempt) {
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) {
      fd_ = fd;
      return;
    }
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) break;
    if (attempt < kAttempts) {
      std::this_thread::sleep_for(kBetweenAttempts);
      continue;
    }
    const std::string who = holder(fd);
    ::close(fd);
    throw UsageError("another run writes into '{}'{}: give each run a folder of its own, or wait "
                     "until the other one has ended",
                     folder.string(), who);
  }
  ::close(fd);
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

}  // namespace lockstep
