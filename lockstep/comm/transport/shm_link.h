// A link through shared memory: two rings of slots, and a socket to wake each other.
#pragma once

#include <deque>
#include <memory>
#include <optional>

#include <lockstep/comm/transport/link.h>
#include <lockstep/comm/transport/shared_heap.h>
#include <lockstep/comm/transport/shared_memory.h>
#include <lockstep/comm/transport/shm_channel.h>
#include <lockstep/comm/transport/shm_segment.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

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

  // Any thread: tells the peer of a segment of the heap, or, with null, that it is gone.
  void announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory) {
    channel_.announce(segment, memory);
  }

 private:
  // The answer to an exchange that the peer will leave in a slot of ours.
  struct Answer {
    std::uint64_t fill;  // there when this many slots have been emptied
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
  bool needs_fence_;              // before a look at whether the peer sleeps
  std::uint64_t sent_ = 0;        // slots filled
  std::uint64_t freed_ = 0;       // of them, emptied by the peer, and their answers taken
  std::uint64_t referenced_ = 0;  // slots up to here must be emptied before memory may be reused
  std::uint64_t received_ = 0;    // slots emptied
  std::deque<Answer> answers_;
};

}  // namespace lockstep::comm
