#include <lockstep/base/mapped_file.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>

namespace lockstep {

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  // Without O_NONBLOCK a FIFO would wait for a writer, for ever.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0)
    throw UsageError("cannot open '{}': {}{}", path.string(), std::strerror(errno),
                     errno == EACCES ? " (as this user)" : "");
  struct stat info {};
  const bool known = ::fstat(fd, &info) == 0;
  if (!known || !S_ISREG(info.st_mode)) {
    ::close(fd);
    throw UsageError("'{}' is not a file that can be mapped into memory{}", path.string(),
                     known && S_ISDIR(info.st_mode) ? ": it is a folder" : "");
  }
  size_ = static_cast<std::size_t>(info.st_size);
  void* const place = size_ == 0 ? nullptr : ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
  const int why = errno;
  ::close(fd);
  if (place == MAP_FAILED)
    throw UsageError("cannot map '{}' ({} bytes) into memory: {}", path.string(), size_,
                     std::strerror(why));
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
