// Memory that TCP links use again.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

namespace lockstep::comm {

// Memory of frames that are gone, for the next ones: pieces of that size would go back to the
// kernel and come again page by page. Shared by the links of a group, which one thread uses at a
// time.
class SpareFrames {
 public:
  // Empty, with some capacity where there is any.
  std::vector<std::byte> take();
  void give(std::vector<std::byte> memory) noexcept;

 private:
  static constexpr std::size_t kMost = 16;

  std::array<std::vector<std::byte>, kMost> spare_;
  std::size_t num_spare_ = 0;
};

}  // namespace lockstep::comm
