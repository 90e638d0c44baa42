#include <lockstep/comm/transport/shared_memory.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include <lockstep/base/error.h>

namespace lockstep::comm {

namespace {
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;
}

SharedMemory::SharedMemory(net::Fd descriptor, std::size_t bytes)
    : descriptor_(std::move(descriptor)), size_(bytes) {
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_.get(), 0);
  if (mapped == MAP_FAILED)
    throw UsageError("cannot map {} bytes of shared memory: {}", bytes, std::strerror(errno));
  data_ = static_cast<std::byte*>(mapped);
}

SharedMemory SharedMemory::create(std::size_t bytes) {
  net::Fd descriptor(::memfd_create("lockstep", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor || ::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0)
    throw UsageError("cannot make {} bytes of shared memory: {}. Is memory limited (ulimit -v, a "
                     "container's limit)?",
                     bytes, std::strerror(errno));
  ::fcntl(descriptor.get(), F_ADD_SEALS, kSeals);
  return SharedMemory(std::move(descriptor), bytes);
}

SharedMemory SharedMemory::map(net::Fd descriptor, std::size_t bytes) {
  struct stat info {};
  if (::fstat(descriptor.get(), &info) != 0 || static_cast<std::size_t>(info.st_size) < bytes ||
      (::fcntl(descriptor.get(), F_GET_SEALS) & kSeals) != kSeals)
    throw CommError({.fault = Fault::corrupted,
                     .operation = "map shared memory",
                     .explanation = fmt::format("A peer offered {} bytes where {} are needed, or "
                                                "memory that is not sealed.",
                                                info.st_size, bytes)});
  SharedMemory mapped(std::move(descriptor), bytes);
  mapped.descriptor_.reset();
  return mapped;
}

void SharedMemory::forget(std::size_t offset, std::size_t bytes) {
  // It is only memory that is not saved where it fails, but what it promises must still hold.
  if (::fallocate(descriptor_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    std::memset(data_ + offset, 0, bytes);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : descriptor_(std::move(other.descriptor_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    unmap();
    descriptor_ = std::move(other.descriptor_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() { unmap(); }

void SharedMemory::unmap() {
  if (data_ != nullptr) ::munmap(data_, size_);
  data_ = nullptr;
}

}  // namespace lockstep::comm
