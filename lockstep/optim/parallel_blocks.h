// Work on blocks of memory, spread over LibTorch's own threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace lockstep::optim {

// A piece of one of several ranges of elements.
struct Block {
  std::size_t range = 0;
  std::int64_t number = 0;  // counted through all ranges
  std::int64_t begin = 0;   // within the range
  std::int64_t count = 0;
};

// Cuts ranges of `counts` elements into blocks of `block_elements` (the last of a range may be
// smaller) and calls `work` once for each: in order in a thread, in no order between them. Where
// blocks begin does not depend on the number of threads. `work` must not call LibTorch's operators.
void parallel_blocks(std::span<const std::int64_t> counts, std::int64_t block_elements,
                     const std::function<void(const Block&)>& work);

}  // namespace lockstep::optim
