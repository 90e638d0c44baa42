// The Unix socket beside the rings of two ranks: it wakes who sleeps, hands over the segments of
// their heaps and, by closing, tells of a death.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <lockstep/comm/transport/shared_memory.h>
#include <lockstep/comm/transport/shm_segment.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// Owned by its link, and used by one thread at a time except where a comment says otherwise.
// Nothing here waits. Failure: a peer that is gone is a state (hung_up), not an error; CommError
// (corrupted) where it offers memory that is not what it says.
class ShmChannel {
 public:
  // Over a socket that both sides have authenticated; `mine` and `theirs` are in the segments.
  ShmChannel(net::Fd socket, ShmControl& mine, const ShmControl& theirs);

  int descriptor() const { return socket_.get(); }
  bool hung_up() const { return hung_up_; }

  // Any thread.
  void wake_peer();

  // Any thread: tells the peer of a segment of our heap, or, with null, that it is gone; where the
  // socket is full, at one of the next calls.
  void announce(std::uint32_t segment, const std::shared_ptr<SharedMemory>& memory);
  bool announced(std::uint32_t segment) const {
    return segment <= announced_.load(std::memory_order_acquire);
  }

  // When a call begins: catches up with both sides' heaps. What the peer has given back stays
  // mapped until then, when no call can be looking at it any more.
  void begin_call();

  // Reads whatever has come.
  void read();

  // A segment of the peer's heap; null where it was never announced, empty where this process could
  // not take it over.
  const SharedMemory* peer_segment(std::uint32_t segment);

 private:
  struct Signal;
  struct Announcement {
    std::uint32_t segment;
    std::shared_ptr<SharedMemory> memory;  // null where it is gone
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
  std::atomic<std::uint32_t> announced_{0};  // the peer is told of segments up to here

  std::map<std::uint32_t, SharedMemory> peer_heap_;
  std::vector<std::uint32_t> removed_;  // of peer_heap_, to be unmapped between calls
  std::uint32_t announcements_seen_ = 0;
};

}  // namespace lockstep::comm
