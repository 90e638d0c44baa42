// A share of some things, spread evenly over all of them: 0.5 is every second.
#pragma once

#include <cmath>
#include <cstddef>

namespace lockstep {

inline std::size_t num_in_share(std::size_t count, double share) {
  return static_cast<std::size_t>(std::lround(share * static_cast<double>(count)));
}

inline bool is_in_share(std::size_t index, std::size_t count, double share) {
  const std::size_t chosen = num_in_share(count, share);
  return (index + 1) * chosen / count > index * chosen / count;
}

}  // namespace lockstep
