#include <lockstep/comm/transport/spare_frames.h>

#include <utility>

namespace lockstep::comm {

std::vector<std::byte> SpareFrames::take() {
  if (num_spare_ == 0) return {};
  return std::exchange(spare_[--num_spare_], {});
}

void SpareFrames::give(std::vector<std::byte> memory) noexcept {
  if (memory.capacity() == 0 || num_spare_ == kMost) return;
  memory.clear();
  spare_[num_spare_++] = std::move(memory);
}

}  // namespace lockstep::comm
