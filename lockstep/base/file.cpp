#include <lockstep/base/file.h>

#include <fcntl.h>
#include <sys/mman.h>
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

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  const RegularFile file(path);
  size_ = static_cast<std::size_t>(file.size());
  void* const place =
      size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, file.fd(), 0);
  if (place == MAP_FAILED)
    throw UsageError("cannot map '{}' ({} bytes) into memory: {}", path.string(), size_,
                     std::strerror(errno));
  data_ = static_cast<const std::byte*>(place);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace lockstep
