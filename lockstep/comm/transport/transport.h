// The links of one rank to all others of its group, and the one place where communication waits.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/comm/transport/link.h>
#include <lockstep/comm/transport/shared_memory.h>
#include <lockstep/net/fd.h>

namespace lockstep::comm {

// The memory that a call works in. Pieces stay where they are until they are taken again, even if a
// call fails, because links refer to them. Used by one thread at a time.
class Scratch {
 public:
  // The memory is not initialised.
  std::span<std::byte> take(std::size_t bytes);

  // Marks all memory as free: the next take() hands out the same memory again.
  void reuse() { num_taken_ = 0; }

  // The same, and gives large memory back to the machine.
  void shrink();

 private:
  struct Piece {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes = 0;
  };
  std::vector<Piece> pieces_;
  std::size_t num_taken_ = 0;
};

// The host of each rank of a group: ranks with the same number share a host and its memory.
struct Topology {
  std::vector<int> host_of;  // by rank; hosts are numbered by their first rank

  int num_hosts() const;
  // The ranks on this host, ascending.
  std::vector<int> ranks_on(int host) const;
};

// Algorithms call post_…, view, wait_… and end(); nothing else in this library blocks on a peer.
// Each call of a group runs between begin() and finish() in one thread; any thread may interrupt().
//
// Failure: CommError with the operation, group, sequence number and ranks at fault. The transport
// cannot be used any more then: tell() the others, and destroy it.
class Transport {
 public:
  struct Settings {
    std::string group;
    int rank = 0;
    Topology topology;
    // How long a waiting thread spins before it sleeps.
    std::chrono::microseconds spin{0};
    // The longest message that can be viewed on every link of the group, on every rank.
    std::size_t longest_view = 0;
    // Connections that are made again arrive here.
    std::shared_ptr<Mailbox> mailbox;
    // Asks a peer about the state of the group there; throws if it does not answer. Called from
    // several threads.
    std::function<Endpoint::Answer(int peer, Deadline deadline)> ask;
  };

  // links[rank] is empty.
  Transport(Settings settings, std::vector<std::unique_ptr<Link>> links,
            std::shared_ptr<SharedHeap> heap);
  // Leaves the group in good order if nothing has failed.
  ~Transport();

  int rank() const { return settings_.rank; }
  int size() const { return static_cast<int>(links_.size()); }
  const Topology& topology() const { return settings_.topology; }
  SharedHeap& heap() { return *heap_; }
  std::string kind() const;
  // Bytes of messages sent to each rank so far; 0 for this rank. Any thread may call it.
  std::vector<std::uint64_t> sent_bytes() const;

  void begin(const Fingerprint& call, Deadline deadline);
  // Waits until nothing posted is outstanding. A call may do so several times.
  void end();
  // Ends the call. After a failure call abandon() instead, while the call's memory is still there:
  // nothing refers to it afterwards.
  void finish() { scratch_.shrink(); }
  void abandon() noexcept;

  void post_send(int peer, std::span<const std::byte> bytes) { post_send(peer, call_, bytes); }
  void post_receive(int peer, std::span<std::byte> bytes) { post_receive(peer, call_, bytes); }
  // The same for transfers, which have numbers of their own.
  void post_send(int peer, const Fingerprint& transfer, std::span<const std::byte> bytes) {
    guard([&] { link(peer).post_send(transfer, bytes); });
  }
  void post_receive(int peer, const Fingerprint& transfer, std::span<std::byte> bytes) {
    guard([&] { link(peer).post_receive(transfer, bytes); });
  }

  // Waits for all receives posted for `peer`.
  void wait_received(int peer);

  // Waits for the next message and returns it in place; release() gives it back.
  View view(int peer, std::size_t bytes);
  void release(int peer) {
    guard([&] { link(peer).release_view(); });
  }
  // The longest message that can be viewed. It is the same on all ranks, so that they cut messages
  // alike.
  std::size_t longest_view() const { return settings_.longest_view; }

  // Sends a message that `peer` views and answers in place (View::answer): the answer is in `bytes`
  // after end(). Both ends of a link agree on whether they can do that.
  bool can_exchange(int peer) { return link(peer).can_exchange(); }
  void post_exchange(int peer, std::span<std::byte> bytes) {
    guard([&] { link(peer).post_exchange(call_, bytes); });
  }

  // Memory for the call, from which it may also send. It is valid until the first scratch() after
  // end().
  std::span<std::byte> scratch(std::size_t bytes) { return scratch_.take(bytes); }

  // Checks the peers between calls: throws CommError if one is gone, or has said that the group is
  // over. `call` is the call that this rank waits for elsewhere. Call it again and again, as
  // messages of a dead peer get a moment to arrive.
  void look(const Fingerprint& call);

  // Tells every peer that the group is over.
  void tell(const Notice& notice);

  // Makes every wait, current or later, throw. Any thread may call it.
  void interrupt(const Notice& notice);

 private:
  Link& link(int peer) { return *links_[static_cast<std::size_t>(peer)]; }

  // Runs a step that may throw: then the links let go of the call's memory before the caller frees
  // it.
  template <typename Step>
  void guard(Step step) {
    try {
      step();
    } catch (...) {
      abandon();
      throw;
    }
  }

  template <typename Ready>
  void wait(Ready ready, int peer) {
    guard([&] { wait_until(ready, peer); });
  }
  template <typename Ready>
  void wait_until(Ready ready, int peer);
  void sleep(milliseconds longest);
  void progress_all();
  bool look_at_peers();
  void check_peers(int awaited_peer);
  [[noreturn]] void fail(CommError::Details details);
  [[noreturn]] void timed_out(int awaited_peer);

  Settings settings_;
  std::vector<std::unique_ptr<Link>> links_;
  std::shared_ptr<SharedHeap> heap_;
  net::Fd interrupt_event_;
  std::atomic<bool> interrupted_{false};
  std::mutex interrupt_mutex_;
  std::optional<Notice> interrupt_notice_;
  bool failed_ = false;
  std::vector<PeerState> states_;  // by rank, as look_at_peers() found them
  std::optional<Clock::time_point> death_seen_;
  std::vector<int> first_dead_;

  Scratch scratch_;

  Fingerprint call_;
  Deadline deadline_ = Deadline::never();
};

}  // namespace lockstep::comm
