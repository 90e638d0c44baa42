// The memory that a call works in.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace lockstep::comm {

// Pieces stay where they are until they are taken again, also when a call fails: links refer to
// them. Used by one thread at a time.
class Scratch {
 public:
  // Not initialised.
  std::span<std::byte> take(std::size_t bytes);

  // Nothing is in use any more: the next take() hands out the same memory.
  void reuse() { num_taken_ = 0; }

  // The same, and what is large goes back to the machine.
  void shrink();

 private:
  struct Piece {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0;
  };
  std::vector<Piece> pieces_;
  std::size_t num_taken_ = 0;
};

}  // namespace lockstep::comm
