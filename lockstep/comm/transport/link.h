// One rank's connection to one other: two streams of messages, each in order. Nothing here blocks;
// Transport does the waiting.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/operations/operation.h>
#include <lockstep/net/address.h>

namespace lockstep::comm {

// Why a group ended. The rank that found a fault sends it to the others, so that all of them throw
// the same error.

struct Notice {
  static constexpr std::size_t kMostBytes = 3072;  // encoded; longer texts are cut

  Fault fault = Fault::aborted;
  int found_by = 0;  // the rank that found it
  std::uint64_t sequence = 0;
  std::string operation;
  std::vector<int> ranks;  // the ranks at fault
  std::string explanation;

  // `found_by` is the rank that throws the error, unless the error names another one.
  static Notice from(const CommError& error, int found_by);

  // The error that a rank of `group` throws for it.
  CommError error(const std::string& group, int rank) const;

  std::vector<std::byte> encode() const;
  // Reads a peer's bytes; a malformed notice becomes a plain "aborted".
  static Notice decode(std::span<const std::byte> bytes);
};

// The state of the other side.
enum class PeerState : std::uint8_t {
  alive,
  broken,   // the connection is down; it may come back
  closed,   // the peer has left the group in good order
  aborted,  // the peer ended the group; notice() says why
  dead,     // the peer's process is gone
};

// A message in the memory where it arrived. If the message is an exchange, `answer` is the same
// memory: bytes that are written there before the view is released go back to the sender.
struct View {
  const std::byte* data = nullptr;
  std::byte* answer = nullptr;
};

// Every message carries the fingerprint of its call, so a rank that is in another call, or that
// counts differently, is found at its first message.
//
// Owned by its Transport and used by one thread at a time, except where a comment says otherwise.
class Link {
 public:
  Link(int self, int peer) : self_(self), peer_(peer) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  int self() const { return self_; }
  int peer() const { return peer_; }

  // Queues a message; its bytes must not change until sends_done().
  void post_send(const Fingerprint& call, std::span<const std::byte> bytes) {
    count_sent(bytes.size());
    sends_.push_back({call, bytes, 0, nullptr});
    progress();
  }

  // Queues a message of at most longest_view() that the peer views and may answer in place: once
  // sends_done(), `bytes` hold its answer. Only where can_exchange().
  void post_exchange(const Fingerprint& call, std::span<std::byte> bytes) {
    count_sent(bytes.size());
    sends_.push_back({call, bytes, 0, bytes.data()});
    progress();
  }
  virtual bool can_exchange() const = 0;

  // Queues a receive: the next message goes to `bytes` and must be exactly that long.
  void post_receive(const Fingerprint& call, std::span<std::byte> bytes) {
    receives_.push_back({call, bytes, 0});
    progress();
  }

  // Moves whatever can move now, and returns true if something did. Throws CommError (mismatch,
  // corrupted).
  virtual bool progress() = 0;

  bool idle() const { return sends_done() && receives_done(); }
  virtual bool sends_done() const { return sends_.empty(); }
  bool receives_done() const { return receives_.empty(); }

  // Returns the next message without a copy; nothing while it is not there, or while receives are
  // queued before it. It stays valid until release_view(). Messages longer than longest_view()
  // cannot be viewed.
  virtual std::optional<View> try_view(const Fingerprint& call, std::size_t bytes) = 0;
  virtual void release_view() = 0;
  virtual std::size_t longest_view() const = 0;

  // Called when a call begins, to catch up on work that is not urgent.
  virtual void begin_call() {}

  // Called when a connection that was made again has arrived.
  virtual void take_connection() {}

  // Called when a call ends, once sends_done(): the link must not use the call's memory afterwards.
  virtual void end_call() {}

  // Called when a call fails, while its memory is still there: the link must not use it afterwards.
  virtual void abandon_call() noexcept {
    sends_.clear();
    receives_.clear();
  }

  // Tells the link whether a thread waits for the next message with try_view().
  void set_view_wanted(bool wanted) { view_wanted_ = wanted; }

  // For sleeping until something happens: before poll(2), arm() asks the peer to ring; it returns
  // false if something can be done already. woken() handles the events that poll reported.
  virtual int descriptor() const = 0;
  virtual short wanted_events() const = 0;
  virtual bool arm() = 0;
  virtual void disarm() {}
  virtual void woken(short events) = 0;

  // Checks a broken connection and makes it again, or finds out that this is impossible.
  virtual void repair(Deadline) {}

  virtual PeerState state() const = 0;
  // Why the peer aborted.
  virtual Notice notice() const = 0;

  // Tells the peer that the group is over, as far as that works without waiting; finish_notice()
  // then waits until the peer has the notice or the deadline has passed. The link cannot be used
  // afterwards.
  virtual void send_notice(const Notice& notice) = 0;
  virtual void finish_notice(Deadline) {}
  // Tells the peer that this rank leaves in good order.
  virtual void send_goodbye(Deadline deadline) = 0;

  // "shm" or "tcp".
  virtual const char* kind() const = 0;

  // Bytes of messages, and of answers to exchanges, posted for the peer so far, without what the
  // medium adds to them. Any thread may call it.
  std::uint64_t sent_bytes() const { return sent_bytes_.load(std::memory_order_relaxed); }

 protected:
  struct Send {
    Fingerprint call;
    std::span<const std::byte> bytes;
    std::size_t done;
    std::byte* answer;  // the same bytes if the message is an exchange
  };
  struct Receive {
    Fingerprint call;
    std::span<std::byte> bytes;
    std::size_t done;
  };

  // Throws CommError (mismatch) naming both calls if the peer's message is not the expected one.
  void check_message(const Fingerprint& mine, std::size_t my_bytes, const Fingerprint& theirs,
                     std::size_t their_bytes) const;

  // Only one thread at a time counts, so no atomic addition is needed.
  void count_sent(std::size_t bytes) {
    sent_bytes_.store(sent_bytes() + bytes, std::memory_order_relaxed);
  }

  bool receiving() const { return view_wanted_ || !receives_.empty(); }

  std::deque<Send> sends_;
  std::deque<Receive> receives_;

 private:
  int self_;
  int peer_;
  bool view_wanted_ = false;
  std::atomic<std::uint64_t> sent_bytes_{0};
};

// The addresses at which other processes reach a process. Each process tells the others its own.
struct EndpointAddress {
  std::string host;  // identifies the host, its boot and its network: equal means shared memory
  std::string unix_name;  // name of its abstract Unix socket
  net::Address tcp;
  std::vector<int> cores;  // the cores that the process may run on

  std::string encode() const;
  static EndpointAddress decode(const std::string& text);  // CommError (corrupted)
};

}  // namespace lockstep::comm
