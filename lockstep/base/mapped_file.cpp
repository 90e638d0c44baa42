#include <lockstep/base/mapped_file.h>

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/regular_file.h>

namespace lockstep {

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
