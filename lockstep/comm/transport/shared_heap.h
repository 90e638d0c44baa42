// Buffers that peers on this host can read in place (Communicator::allocate).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include <lockstep/comm/transport/shared_memory.h>

namespace lockstep::comm {

// Carves buffers out of a few large segments: each segment is a descriptor that every peer has to
// be handed. A segment takes memory only where it has been written to.
//
// Thread-safe. Shared by the transport and by the tensors made from it, whichever lives longer.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  static constexpr std::size_t kSegmentBytes = 64u << 20;  // larger buffers have one of their own

  struct Place {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;
  };

  // Told of each new segment, and, with null, of each that is gone. Segments are numbered in the
  // order in which they are made.
  using Announce =
      std::function<void(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory)>;

  void set_announce(Announce announce);

  // At least `bytes`, zeroed, aligned to a page. The memory goes back when the pointer does.
  // UsageError where the machine has no more.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  // Where these bytes lie for peers; nothing where they are ordinary memory.
  std::optional<Place> find(const std::byte* data, std::size_t bytes) const;

 private:
  struct Segment {
    std::uint32_t number = 0;
    std::shared_ptr<SharedMemory> memory;
    std::map<std::size_t, std::size_t> gaps;  // offset → bytes; never two that touch

    bool empty() const { return !gaps.empty() && gaps.begin()->second == memory->size(); }
    // The offset of `bytes` taken out of the first gap that has them.
    std::optional<std::size_t> take(std::size_t bytes);
    void give_back(std::size_t offset, std::size_t bytes);
  };
  using Segments = std::map<const std::byte*, Segment>;  // by where they begin

  Segments::iterator add_segment(std::size_t bytes);
  void free(std::byte* data, std::size_t bytes);

  mutable std::mutex mutex_;
  std::atomic<bool> used_{false};  // so that programs that allocate nothing pay nothing
  std::uint32_t next_number_ = 1;
  Segments segments_;
  Announce announce_;
};

}  // namespace lockstep::comm
