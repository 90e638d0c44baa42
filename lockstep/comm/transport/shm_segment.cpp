#include <lockstep/comm/transport/shm_segment.h>

#include <algorithm>

#include <lockstep/comm/transport/heavy_fence.h>

namespace lockstep::comm {

namespace {

// A group's rings on one host stay around this size, whatever the number of ranks.
constexpr std::size_t kRingsBytes = 8u << 20;
constexpr std::size_t kLargestSlot = 64u << 10;
constexpr std::size_t kSmallestSlot = 4u << 10;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

ShmLayout::ShmLayout(int num_ranks) {
  const auto rings = static_cast<std::size_t>(std::max(num_ranks - 1, 1));
  slot_bytes =
      std::clamp(kRingsBytes / rings / kSlots / kPage * kPage, kSmallestSlot, kLargestSlot);
  ring_bytes = round_up(sizeof(ShmRing), kPage) + kSlots * slot_bytes;
  segment_bytes = kPage + static_cast<std::size_t>(num_ranks) * ring_bytes;
}

ShmSegment::ShmSegment(int num_ranks, FencePayer payer)
    : layout_(num_ranks), memory_(SharedMemory::create(layout_.segment_bytes)) {
  control().heavy_fences = payer == FencePayer::sleeper && take_part_in_heavy_fences() ? 1 : 0;
}

ShmControl& ShmSegment::control() const { return *reinterpret_cast<ShmControl*>(memory_.data()); }

// The flag is set, then a fence, then we look once more for work; a peer publishes work, then a
// fence, then looks at the flag: one of the two sees the other. The fence of the peer may be ours
// (heavy_fence).
void ShmSegment::ask_for_rings() {
  ShmControl& mine = control();
  if (mine.sleeping.load(std::memory_order_relaxed) != 0) return;
  if (++num_sleeps_ == 0) ++num_sleeps_;
  mine.sleeping.store(num_sleeps_, std::memory_order_relaxed);
  if (mine.heavy_fences != 0) {
    heavy_fence();
  } else {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
}

void ShmSegment::stop_rings() { control().sleeping.store(0, std::memory_order_relaxed); }

}  // namespace lockstep::comm
