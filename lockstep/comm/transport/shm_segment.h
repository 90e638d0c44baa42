// The memory through which ranks of one host talk. Each rank owns a segment that holds, for every
// peer, a ring of slots it fills and the peer empties.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <lockstep/comm/fingerprint.h>
#include <lockstep/comm/transport/notice.h>
#include <lockstep/comm/transport/shared_memory.h>

namespace lockstep::comm {

// How a rank's segment is laid out: a control page, then one ring for each rank of the group. All
// ranks of a group compute the same from the number of ranks.
struct ShmLayout {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kSlots = 8;

  explicit ShmLayout(int num_ranks);

  std::size_t slot_bytes;
  std::size_t ring_bytes;
  std::size_t segment_bytes;

  std::size_t ring_offset(int rank) const {
    return kPage + static_cast<std::size_t>(rank) * ring_bytes;
  }
};

// The first page of a segment: the state of its owner, for all peers to read.
struct ShmControl {
  // The number of the owner's sleep, 0 where it is awake or has been rung: set by the owner,
  // cleared by who has rung.
  alignas(64) std::atomic<std::uint32_t> sleeping;
  std::uint32_t heavy_fences;  // the owner makes one before it sleeps; fixed from the start
  alignas(64) std::atomic<std::uint32_t> announcements;  // signals of heap changes sent so far
  alignas(64) std::atomic<std::uint32_t> closed;         // left in good order
  std::atomic<std::uint32_t> aborted;                    // the notice below is valid
  std::uint32_t notice_bytes;
  std::byte notice[Notice::kMostBytes];
};
static_assert(sizeof(ShmControl) <= ShmLayout::kPage);

// One message, or a fragment of one. `filled` is written last by the sender and read first by the
// receiver (release, acquire); the slot is the sender's again when `emptied` has passed it.
struct alignas(64) ShmSlot {
  std::atomic<std::uint64_t> filled;  // number of this fill, from 1
  Fingerprint call;
  std::uint64_t message_bytes;
  std::uint32_t bytes;    // in this slot; 0 where the message lies in the sender's heap
  std::uint32_t segment;  // of the sender's heap; 0 where the bytes are in the slot
  std::uint64_t offset : 63;
  std::uint64_t exchange : 1;  // the receiver may write to it
};
static_assert(sizeof(ShmSlot) == 64);

struct ShmRing {
  alignas(64) std::atomic<std::uint64_t> emptied;  // written by the receiver
  ShmSlot slots[ShmLayout::kSlots];
};

// This rank's segment, shared by its links.
class ShmSegment {
 public:
  // Who pays for the fences between a rank that falls asleep and those who ring it. Ringing comes
  // after every message; falling asleep is rare where ranks look for a while first, but a fence of
  // the sleeper's interrupts every core that runs a rank.
  enum class FencePayer { ringer, sleeper };

  ShmSegment(int num_ranks, FencePayer payer);

  const ShmLayout& layout() const { return layout_; }
  const SharedMemory& memory() const { return memory_; }
  ShmControl& control() const;

  // From when this returns, whoever does something for this rank rings; what was done before is
  // there to be seen.
  void ask_for_rings();
  void stop_rings();

 private:
  ShmLayout layout_;
  SharedMemory memory_;
  std::uint32_t num_sleeps_ = 0;
};

}  // namespace lockstep::comm
