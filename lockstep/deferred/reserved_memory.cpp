#include <lockstep/deferred/reserved_memory.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::deferred {

std::optional<ReservedMemory> ReservedMemory::reserve(std::size_t bytes) {
  LOCKSTEP_CHECK(bytes > 0);
  void* const address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return std::nullopt;
  ReservedMemory memory(address, bytes);
  // A huge page could be shared with the neighbour, who would then seem touched, too. Fails where
  // the system has none.
  madvise(address, bytes, MADV_NOHUGEPAGE);
  if (memory.touched()) return std::nullopt;
  return memory;
}

ReservedMemory::~ReservedMemory() {
  if (address_ != nullptr) munmap(address_, bytes_);
}

ReservedMemory::ReservedMemory(ReservedMemory&& other) noexcept
    : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}

bool ReservedMemory::touched() const {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::array<unsigned char, 4096> resident;  // a byte for each page
  auto* const begin = static_cast<std::byte*>(address_);
  for (std::size_t at = 0; at < bytes_; at += resident.size() * page) {
    const std::size_t length = std::min(bytes_ - at, resident.size() * page);
    const std::size_t pages = (length + page - 1) / page;
    const int failed = mincore(begin + at, length, resident.data());
    LOCKSTEP_CHECK(failed == 0, "mincore: {}", std::strerror(errno));
    if (std::any_of(resident.begin(), resident.begin() + pages,
                    [](unsigned char byte) { return (byte & 1) != 0; }))
      return true;
  }
  return false;
}

void ReservedMemory::discard() const noexcept {
  if (madvise(address_, bytes_, MADV_DONTNEED) != 0)
    log::warn("{} bytes of a deferred tensor stay taken, as the system does not take them back: {}",
              bytes_, std::strerror(errno));
}

}  // namespace lockstep::deferred
