// A link through shared memory: two rings of slots, and a socket to wake each other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <lockstep/comm/operations/operation.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/comm/transport/shared_memory.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// The memory through which ranks of one host talk. Each rank owns a segment with one ring of slots
// for every peer; the rank fills the slots and the peer empties them.
//
// A segment is a control page, then one ring for each rank of the group. All ranks compute the same
// layout from the number of ranks.
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
  // The number of the owner's sleep; 0 while it is awake or has been rung. The owner sets it, and
  // the rank that rings clears it.
  alignas(64) std::atomic<std::uint32_t> sleeping;
  std::uint32_t heavy_fences;  // the owner runs one before it sleeps; fixed from the start
  alignas(64) std::atomic<std::uint32_t> announcements;  // signals of heap changes sent so far
  alignas(64) std::atomic<std::uint32_t> closed;         // the owner has left in good order
  std::atomic<std::uint32_t> aborted;                    // the notice below is valid
  std::uint32_t notice_bytes;
  std::byte notice[Notice::kMostBytes];
};
static_assert(sizeof(ShmControl) <= ShmLayout::kPage);

// One message, or a fragment of one. `filled` is written last by the sender and read first by the
// receiver (release, acquire); the slot belongs to the sender again when `emptied` has passed it.
struct alignas(64) ShmSlot {
  std::atomic<std::uint64_t> filled;  // number of this fill, from 1
  Fingerprint call;
  std::uint64_t message_bytes;
  std::uint32_t bytes;    // bytes in this slot; 0 if the message is in the sender's heap
  std::uint32_t segment;  // segment of the sender's heap; 0 if the bytes are in the slot
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
  // The side that pays for the fences between a rank that falls asleep and the peers that ring it.
  // Ringing comes after every message; falling asleep is rare if ranks spin first, but a fence by
  // the sleeper interrupts every core that runs a rank.
  enum class FencePayer { ringer, sleeper };

  ShmSegment(int num_ranks, FencePayer payer);

  const ShmLayout& layout() const { return layout_; }
  const SharedMemory& memory() const { return memory_; }
  ShmControl& control() const;

  // Once this has returned, a peer that does something for this rank rings; earlier work of peers
  // is visible already.
  void ask_for_rings();
  void stop_rings();

 private:
  ShmLayout layout_;
  SharedMemory memory_;
  std::uint32_t num_sleeps_ = 0;
};

// The Unix socket beside the rings of two ranks: it wakes a sleeping peer, hands over the segments
// of their heaps and, by closing, tells of a death.
//
// Owned by its link, and used by one thread at a time except where a comment says otherwise.
// Nothing here waits. Failure: a peer that is gone is a state (hung_up), not an error; CommError
// (corrupted) if it offers memory of another kind or size than it announced.
class ShmChannel {
 public:
  // Both sides have authenticated the socket; `mine` and `theirs` are in the segments.
  ShmChannel(net::Fd socket, ShmControl& mine, const ShmControl& theirs);

  int descriptor() const { return socket_.get(); }
  bool hung_up() const { return hung_up_; }

  // Any thread may call it.
  void wake_peer();

  // Tells the peer of a segment of our heap, or, with null, that it is gone. If the socket is full,
  // one of the next calls does it. Any thread may call it.
  void announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory);
  bool announced(std::uint32_t segment) const {
    return segment <= announced_.load(std::memory_order_acquire);
  }

  // Called when a call begins: catches up with changes of both sides' heaps. Segments that the peer
  // has freed stay mapped until then, when no call can be using them any more.
  void begin_call();

  // Reads all messages that have come.
  void read();

  // Returns a segment of the peer's heap: null if it was never announced, empty if this process
  // could not map it.
  const SharedMemory* peer_segment(std::uint32_t segment);

 private:
  struct Signal;
  struct Announcement {
    std::uint32_t segment;
    std::shared_ptr<SharedMemory> memory;  // null if the segment is gone
  };

  bool send(const Signal& signal, int descriptor);
  void announce_waiting();

  net::Fd socket_;
  ShmControl& mine_;
  const ShmControl& theirs_;
  bool hung_up_ = false;

  std::mutex announcing_;
  std::deque<Announcement> to_announce_;  // guarded by announcing_
  std::atomic<bool> announcements_wait_{false};
  std::atomic<std::uint32_t> announced_{0};  // the peer has been told of segments up to here

  std::map<std::uint32_t, SharedMemory> peer_heap_;
  std::vector<std::uint32_t> removed_;  // segments of peer_heap_ to be unmapped between calls
  std::uint32_t announcements_seen_ = 0;
};

class ShmLink final : public Link {
 public:
  // Swaps descriptors with the peer over `socket`, which both sides have authenticated.
  ShmLink(int self, int peer, net::Fd socket, std::shared_ptr<ShmSegment> segment,
          std::shared_ptr<SharedHeap> heap, Deadline deadline);

  bool progress() override;
  bool sends_done() const override;
  std::optional<View> try_view(const Fingerprint& call, std::size_t bytes) override;
  void release_view() override;
  std::size_t longest_view() const override { return segment_->layout().slot_bytes; }
  bool can_exchange() const override { return true; }
  void abandon_call() noexcept override;
  void begin_call() override;
  int descriptor() const override { return channel_.descriptor(); }
  short wanted_events() const override;
  bool arm() override;
  void disarm() override;
  void woken(short events) override;
  PeerState state() const override;
  Notice notice() const override;
  void send_notice(const Notice& notice) override;
  void send_goodbye(Deadline deadline) override;
  const char* kind() const override { return "shm"; }

  // Tells the peer of a segment of the heap, or, with null, that it is gone. Any thread may call
  // it.
  void announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory) {
    channel_.announce(segment, memory);
  }

 private:
  // An answer to an exchange, which the peer will leave in a slot of ours.
  struct Answer {
    std::uint64_t fill;  // the answer is there once this many slots have been emptied
    std::span<std::byte> destination;
  };

  bool progress_sends();
  bool settle();
  bool progress_receives();
  std::byte* outgoing_slot(std::uint64_t fill) const;
  const ShmSlot* arrived() const;
  std::byte* payload(const ShmSlot& slot);
  std::optional<SharedHeap::Place> place_of(std::span<const std::byte> bytes) const;
  void check_still_there(const ShmSlot& slot) const;
  void consume();
  void ring_peer();

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<SharedHeap> heap_;
  SharedMemory peer_memory_;
  ShmControl& peer_control_;
  ShmChannel channel_;
  ShmRing* outgoing_ = nullptr;  // in our segment
  ShmRing* incoming_ = nullptr;  // in the peer's
  std::byte* outgoing_data_ = nullptr;
  std::byte* incoming_data_ = nullptr;
  bool needs_fence_;              // before checking whether the peer sleeps
  std::uint64_t sent_ = 0;        // slots filled
  std::uint64_t freed_ = 0;       // slots that the peer has emptied and whose answers were taken
  std::uint64_t referenced_ = 0;  // slots up to here must be emptied before memory may be reused
  std::uint64_t received_ = 0;    // slots emptied
  std::deque<Answer> answers_;
};

}  // namespace lockstep::comm
