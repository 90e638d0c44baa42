#include <lockstep/base/regular_file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

const char* kind_name(::mode_t mode) {
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

[[noreturn]] void refuse(const std::filesystem::path& path, ::mode_t mode) {
  throw UsageError("'{}' is {}, and only regular files are read", path.string(), kind_name(mode));
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path) {
  // A FIFO is opened without waiting for its writer, and a terminal does not become this process's.
  fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  const int why = errno;
  struct stat info {};
  if (fd_ < 0) {
    // Sockets, and devices that are not there, cannot be opened at all.
    if (why == ENXIO && ::stat(path.c_str(), &info) == 0) refuse(path, info.st_mode);
    throw UsageError("cannot open '{}': {}{}", path.string(), std::strerror(why),
                     why == EACCES ? " (as this user)" : "");
  }
  if (::fstat(fd_, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd_);
    refuse(path, info.st_mode);
  }
  size_ = static_cast<std::uint64_t>(info.st_size);
}

RegularFile::~RegularFile() {
  if (fd_ >= 0) ::close(fd_);
}

RegularFile::RegularFile(RegularFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

}  // namespace lockstep
