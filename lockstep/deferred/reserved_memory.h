// Addresses that take no memory until somebody writes there.
#pragma once

#include <cstddef>
#include <optional>

namespace lockstep::deferred {

// Owns the addresses; they stay where they are until it goes. Threading: one at a time.
class ReservedMemory {
 public:
  // Nothing where the system gives no addresses without memory behind them: it was told not to
  // (vm.overcommit_memory=2), the process may have no more (ulimit -v) or locks what it has
  // (mlockall).
  static std::optional<ReservedMemory> reserve(std::size_t bytes);

  ~ReservedMemory();
  ReservedMemory(ReservedMemory&& other) noexcept;
  ReservedMemory& operator=(ReservedMemory&&) = delete;

  void* address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

  // Whether anybody has read or written there since it was new or discarded: a page that was only
  // read is resident, too, as the system's page of zeros. Missed where all that was written has
  // gone to swap.
  bool touched() const;
  // Gives the memory back; what stood there is gone, and reads as zeros.
  void discard() const noexcept;

 private:
  ReservedMemory(void* address, std::size_t bytes) : address_(address), bytes_(bytes) {}

  void* address_;
  std::size_t bytes_;
};

}  // namespace lockstep::deferred
