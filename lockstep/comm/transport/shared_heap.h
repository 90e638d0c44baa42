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

// Thread-safe. Shared by the transport and by the tensors made from it, whichever lives longer.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  struct Place {
    std::uint32_t segment = 0;
    std::uint64_t offset = 0;
  };

  // Told of each new segment (with its descriptor) and each that is gone (descriptor −1).
  using Announce = std::function<void(std::uint32_t segment, std::size_t bytes, int descriptor)>;

  void set_announce(Announce announce);

  // At least `bytes`, aligned to a page. The memory goes back when the pointer does.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

  // Where these bytes lie for peers; nothing where they are ordinary memory.
  std::optional<Place> find(const std::byte* data, std::size_t bytes) const;

 private:
  void free(std::uint32_t segment);

  mutable std::mutex mutex_;
  std::atomic<int> num_segments_{0};
  std::uint32_t next_segment_ = 1;
  std::map<const std::byte*, std::pair<std::uint32_t, std::shared_ptr<SharedMemory>>> segments_;
  Announce announce_;
};

}  // namespace lockstep::comm
