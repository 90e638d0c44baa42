#include <lockstep/comm/transport/shared_heap.h>

#include <algorithm>

namespace lockstep::comm {

void SharedHeap::set_announce(Announce announce) {
  const std::lock_guard lock(mutex_);
  announce_ = std::move(announce);
}

std::shared_ptr<std::byte> SharedHeap::allocate(std::size_t bytes) {
  auto memory =
      std::make_shared<SharedMemory>(SharedMemory::create(std::max<std::size_t>(bytes, 1)));
  const std::lock_guard lock(mutex_);
  const std::uint32_t segment = next_segment_++;
  segments_.emplace(memory->data(), std::pair(segment, memory));
  num_segments_.fetch_add(1, std::memory_order_release);
  if (announce_) announce_(segment, memory->size(), memory->descriptor());
  auto self = shared_from_this();
  return std::shared_ptr<std::byte>(memory->data(),
                                    [self, segment](std::byte*) { self->free(segment); });
}

void SharedHeap::free(std::uint32_t segment) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(segments_.begin(), segments_.end(), [segment](const auto& entry) {
    return entry.second.first == segment;
  });
  if (found == segments_.end()) return;
  if (announce_) announce_(segment, found->second.second->size(), -1);
  segments_.erase(found);
  num_segments_.fetch_sub(1, std::memory_order_release);
}

std::optional<SharedHeap::Place> SharedHeap::find(const std::byte* data, std::size_t bytes) const {
  if (num_segments_.load(std::memory_order_acquire) == 0) return std::nullopt;
  const std::lock_guard lock(mutex_);
  auto after = segments_.upper_bound(data);
  if (after == segments_.begin()) return std::nullopt;
  const auto& [begin, entry] = *std::prev(after);
  const auto offset = static_cast<std::size_t>(data - begin);
  if (offset + bytes > entry.second->size()) return std::nullopt;
  return Place{entry.first, offset};
}

}  // namespace lockstep::comm
