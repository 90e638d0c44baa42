#include <lockstep/comm/transport/shared_memory.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
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
  // A failure here only saves no memory, but the memory must still read as zeros.
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

namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

std::optional<std::size_t> SharedHeap::Segment::take(std::size_t bytes) {
  for (auto gap = gaps.begin(); gap != gaps.end(); ++gap) {
    const auto [offset, length] = *gap;
    if (length < bytes) continue;
    gaps.erase(gap);
    if (length > bytes) gaps.emplace(offset + bytes, length - bytes);
    return offset;
  }
  return std::nullopt;
}

void SharedHeap::Segment::give_back(std::size_t offset, std::size_t bytes) {
  auto after = gaps.lower_bound(offset);
  if (after != gaps.end() && after->first == offset + bytes) {
    bytes += after->second;
    after = gaps.erase(after);
  }
  if (after != gaps.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  gaps.emplace(offset, bytes);
}

void SharedHeap::set_announce(Announce announce) {
  const std::lock_guard lock(mutex_);
  announce_ = std::move(announce);
}

std::shared_ptr<std::byte> SharedHeap::allocate(std::size_t bytes) {
  if (bytes > SIZE_MAX / 2)
    throw UsageError("cannot make {} bytes of shared memory: no machine has that much", bytes);
  bytes = std::max((bytes + kPage - 1) / kPage, std::size_t{1}) * kPage;
  const std::lock_guard lock(mutex_);
  used_.store(true, std::memory_order_release);
  std::byte* data = nullptr;
  for (auto& [begin, segment] : segments_) {
    if (const auto offset = segment.take(bytes)) {
      data = segment.memory->data() + *offset;
      break;
    }
  }
  if (data == nullptr) {
    Segment& segment = add_segment(std::max(bytes, kSegmentBytes))->second;
    data = segment.memory->data() + *segment.take(bytes);
  }
  auto self = shared_from_this();
  return std::shared_ptr<std::byte>(data,
                                    [self, bytes](std::byte* freed) { self->free(freed, bytes); });
}

SharedHeap::Segments::iterator SharedHeap::add_segment(std::size_t bytes) {
  auto memory = std::make_shared<SharedMemory>(SharedMemory::create(bytes));
  const Segment segment{next_number_++, memory, {{0, bytes}}};
  const auto added = segments_.emplace(memory->data(), segment).first;
  if (announce_) announce_(segment.number, memory);
  return added;
}

// One empty segment of the usual size is kept, for programs that allocate and free by turns.
void SharedHeap::free(std::byte* data, std::size_t bytes) {
  std::unique_lock lock(mutex_);
  const auto found = std::prev(segments_.upper_bound(data));
  Segment& segment = found->second;
  const auto offset = static_cast<std::size_t>(data - found->first);
  // No other thread touches these pages before they become a gap, so the lock is not held while
  // they are given up, which takes a while.
  lock.unlock();
  segment.memory->forget(offset, bytes);
  lock.lock();
  segment.give_back(offset, bytes);
  if (!segment.empty()) return;
  const auto is_other_empty_one = [&](const auto& entry) {
    return entry.second.number != segment.number && entry.second.empty();
  };
  if (segment.memory->size() == kSegmentBytes &&
      std::none_of(segments_.begin(), segments_.end(), is_other_empty_one))
    return;
  if (announce_) announce_(segment.number, nullptr);
  segments_.erase(found);
}

std::optional<SharedHeap::Place> SharedHeap::find(const std::byte* data, std::size_t bytes) const {
  if (!used_.load(std::memory_order_acquire)) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const auto after = segments_.upper_bound(data);
  if (after == segments_.begin()) return std::nullopt;
  const auto& [begin, segment] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(data - begin);
  if (offset > segment.memory->size() || bytes > segment.memory->size() - offset)
    return std::nullopt;
  return Place{segment.number, offset};
}

}  // namespace lockstep::comm
