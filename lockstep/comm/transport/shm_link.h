// A link through shared memory. Each rank owns one segment that holds, for every peer, a ring of
// slots it fills and the peer empties; a Unix socket beside it wakes sleepers, passes descriptors
// and, by closing, tells of a death.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/comm/transport/link.h>
#include <lockstep/comm/transport/shared_heap.h>
#include <lockstep/comm/transport/shared_memory.h>
#include <lockstep/net/fd.h>

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

struct ShmControl;
struct ShmRing;

// This rank's segment, shared by its links.
class ShmSegment {
 public:
  // How the ranks mostly wait. Who looks before it sleeps falls asleep rarely, so that it can take
  // the cost of the fences between a rank that sleeps and those who ring it upon itself.
  enum class Waiting { asleep, looking };

  ShmSegment(int num_ranks, Waiting waiting);

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
};

class ShmLink final : public Link {
 public:
  // Swaps descriptors with the peer over `socket`, which both sides have authenticated.
  ShmLink(int self, int peer, net::Fd socket, std::shared_ptr<ShmSegment> segment,
          std::shared_ptr<SharedHeap> heap, Deadline deadline);
  ~ShmLink() override;

  bool progress() override;
  bool sends_done() const override;
  std::optional<View> try_view(const Fingerprint& call, std::size_t bytes) override;
  void release_view() override;
  std::size_t longest_view() const override { return segment_->layout().slot_bytes; }
  bool can_exchange() const override { return true; }
  void abandon_call() override;
  void begin_call() override;
  int descriptor() const override { return socket_.get(); }
  short wanted_events() const override;
  bool arm() override;
  void disarm() override;
  void woken(short events) override;
  PeerState state() const override;
  Notice notice() const override;
  void send_notice(const Notice& notice) override;
  void send_goodbye(Deadline deadline) override;
  const char* kind() const override { return "shm"; }

  // Any thread: tells the peer of a segment of the heap, or, with null, that it is gone.
  void announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory);

 private:
  struct Signal;
  struct Announcement {
    std::uint32_t segment;
    std::shared_ptr<SharedMemory> memory;  // null where it is gone
  };
  // The answer to an exchange that the peer will leave in a slot of ours.
  struct Answer {
    std::uint64_t fill;  // there when this many slots have been emptied
    std::span<std::byte> destination;
  };

  bool progress_sends();
  bool settle();
  bool progress_receives();
  std::byte* outgoing_slot(std::uint64_t fill) const;
  const struct ShmSlot* arrived() const;
  std::byte* payload(const struct ShmSlot& slot);
  std::optional<SharedHeap::Place> place_of(std::span<const std::byte> bytes) const;
  void consume();
  void ring_peer();
  bool signal(const Signal& signal, int descriptor);
  void announce_waiting();
  void read_signals();

  std::shared_ptr<ShmSegment> segment_;
  std::shared_ptr<SharedHeap> heap_;
  net::Fd socket_;
  SharedMemory peer_memory_;
  ShmControl* peer_control_ = nullptr;
  ShmRing* outgoing_ = nullptr;  // in our segment
  ShmRing* incoming_ = nullptr;  // in the peer's
  std::byte* outgoing_data_ = nullptr;
  std::byte* incoming_data_ = nullptr;
  std::mutex announcing_;
  std::deque<Announcement> to_announce_;  // guarded by announcing_: the socket was full
  std::atomic<bool> announcements_wait_{false};
  std::atomic<std::uint32_t> announced_{0};          // the peer is told of segments up to here
  std::map<std::uint32_t, SharedMemory> peer_heap_;  // empty ones could not be taken over
  std::vector<std::uint32_t> removed_;               // of peer_heap_, to be unmapped between calls
  std::uint32_t announcements_seen_ = 0;
  bool needs_fence_ = true;       // before a look at whether the peer sleeps
  std::uint64_t sent_ = 0;        // slots filled
  std::uint64_t freed_ = 0;       // of them, emptied by the peer, and their answers taken
  std::uint64_t referenced_ = 0;  // slots up to here must be emptied before memory may be reused
  std::uint64_t received_ = 0;    // slots emptied
  std::deque<Answer> answers_;
  bool hung_up_ = false;
};

}  // namespace lockstep::comm
