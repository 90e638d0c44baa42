// Cutting a row of elements into parts whose lengths differ by at most one.
#pragma once

#include <cstddef>

namespace lockstep::comm {

struct Part {
  std::size_t begin = 0;
  std::size_t count = 0;
};

constexpr Part part_of(std::size_t count, std::size_t num_parts, std::size_t index) {
  const std::size_t begin =
      count / num_parts * index + (index < count % num_parts ? index : count % num_parts);
  return {begin, count / num_parts + (index < count % num_parts ? 1 : 0)};
}

}  // namespace lockstep::comm
