// Memory that several processes map. It has no name: only a process with the descriptor can map it,
// and it is gone with the last mapping.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include <lockstep/net/fd.h>

namespace lockstep::comm {

class SharedMemory {
 public:
  SharedMemory() = default;

  // The memory is zeroed, and sealed at its size so that no peer can shrink it while it is mapped
  // here. UsageError if the machine has no such memory left.
  static SharedMemory create(std::size_t bytes);

  // Maps memory that a peer created, and closes the descriptor. CommError (corrupted) if it is
  // smaller than `bytes` or unsealed.
  static SharedMemory map(net::Fd descriptor, std::size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

  // Gives the memory of whole pages back to the machine; they read as zeros from then on. Only the
  // creator can do that.
  void forget(std::size_t offset, std::size_t bytes);

 private:
  SharedMemory(net::Fd descriptor, std::size_t bytes);
  void unmap();

  net::Fd descriptor_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Buffers that peers on this host can read in place (Communicator::allocate).

// Allocates buffers from a few large segments, because every peer needs the descriptor of each
// segment. A segment takes memory only where it has been written to.
//
// Thread-safe. Shared by the transport and by the tensors made from it, whichever lives longer.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  // larger buffers get a segment of their own
  static constexpr std::size_t kSegmentBytes = 64u << 20;

  struct Place {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;
  };

  // Called with each new segment, and with null for each segment that is gone. Segments are
  // numbered in the order in which they are made.
  using Announce =
      std::function<void(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory)>;

  void set_announce(Announce announce);

  // Allocates at least `bytes`, zeroed and aligned to a page. The memory is freed with the pointer.
  // UsageError if the machine has no more.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  // The place at which peers find these bytes; nothing if they are ordinary memory.
  std::optional<Place> find(const std::byte* data, std::size_t bytes) const;

 private:
  struct Segment {
    std::uint32_t number = 0;
    std::shared_ptr<SharedMemory> memory;
    std::map<std::size_t, std::size_t> gaps;  // offset → bytes; no two gaps touch

    bool empty() const { return !gaps.empty() && gaps.begin()->second == memory->size(); }
    // Takes `bytes` out of the first gap that is large enough, and returns their offset.
    std::optional<std::size_t> take(std::size_t bytes);
    void give_back(std::size_t offset, std::size_t bytes);
  };
  using Segments = std::map<const std::byte*, Segment>;  // keyed by where each begins

  Segments::iterator add_segment(std::size_t bytes);
  void free(std::byte* data, std::size_t bytes);

  mutable std::mutex mutex_;
  std::atomic<bool> used_{false};  // spares programs that allocate nothing the search
  std::uint32_t next_number_ = 1;
  Segments segments_;
  Announce announce_;
};

}  // namespace lockstep::comm
