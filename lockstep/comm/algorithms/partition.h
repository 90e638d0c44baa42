// Cutting a row of elements: into a number of parts, or into pieces of a length.
#pragma once

#include <algorithm>
#include <cstddef>

namespace lockstep::comm {

struct Part {
  std::size_t begin = 0;
  std::size_t count = 0;
};

// The parts' lengths differ by at most one.
constexpr Part part_of(std::size_t count, std::size_t num_parts, std::size_t index) {
  const std::size_t begin =
      count / num_parts * index + (index < count % num_parts ? index : count % num_parts);
  return {begin, count / num_parts + (index < count % num_parts ? 1 : 0)};
}

// Calls visit(begin, count) for each piece of `longest` or, the last one, less; at least once, with
// an empty piece where there is nothing.
template <typename Visit>
void for_pieces(std::size_t count, std::size_t longest, Visit visit) {
  std::size_t begin = 0;
  do {
    const std::size_t size = std::min(longest, count - begin);
    visit(begin, size);
    begin += size;
  } while (begin < count);
}

}  // namespace lockstep::comm
