// Memory that several processes map. It has no name: whoever holds the descriptor can map it,
// nobody else, and it is gone with the last mapping.
#pragma once

#include <cstddef>

#include <lockstep/net/fd.h>

namespace lockstep::comm {

class SharedMemory {
 public:
  SharedMemory() = default;

  // Zeroed; sealed at its size, so that no peer can cut it short under our feet. UsageError where
  // the machine has no such memory left.
  static SharedMemory create(std::size_t bytes);

  // Maps what a peer created, and lets go of the descriptor. CommError (corrupted) where it is
  // smaller than `bytes` or unsealed.
  static SharedMemory map(net::Fd descriptor, std::size_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  int descriptor() const { return descriptor_.get(); }
  explicit operator bool() const { return data_ != nullptr; }

  // Gives the memory of whole pages back to the machine; they read as zeros from then on. Only who
  // created it can.
  void forget(std::size_t offset, std::size_t bytes);

 private:
  SharedMemory(net::Fd descriptor, std::size_t bytes);
  void unmap();

  net::Fd descriptor_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace lockstep::comm
