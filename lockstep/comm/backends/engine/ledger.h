// The ledger: how ranks find out that they are not in the same call, for engines that cannot carry
// a fingerprint with their data.
//
// The first rank to make call number n of a group writes a description of the call under that
// number in the job's store; every other rank compares its own call with that. This takes one
// atomic request for each call and rank, and no rank is in charge. The rank that differs reports
// the fault. A group has one fault, which every rank throws.
//
// A roll call finds out which ranks are missing, but only when a rank has waited in vain. A live
// process answers it from a thread of its own even while its program is busy elsewhere.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/base/error.h>
#include <lockstep/store/store.h>

namespace lockstep::comm::backends {

// Owns two threads and its keys in the store, which end with it; the last rank to leave removes the
// keys that the group shared. Thread-safe. If the store itself is lost, compare and report throw
// its CommError.
class Ledger {
 public:
  // One call as one rank makes it.
  struct Entry {
    std::string key;     // the call's number: equal keys must have equal digests
    std::string digest;  // everything that must agree, as bytes
    std::string text;    // the same in words, for error messages
    std::string operation;
    std::uint64_t sequence = 0;
    std::uint64_t position = 0;  // position in the group's order of calls; 0 for exchanges
  };

  struct Options {
    std::shared_ptr<store::Store> store;
    std::string prefix;  // prefix of all keys
    std::string group;
    int rank = 0;
    int size = 1;
    // Called once, from a thread of the ledger, when this rank or another has reported a fault.
    std::function<void(const CommError::Details&)> on_fault;
    // Called every few milliseconds, from a thread of the ledger.
    std::function<void()> on_tick;
  };

  struct RollCall {
    std::vector<int> silent;  // ranks that do not answer at all
    std::vector<int> behind;  // ranks that answer, but have not made the call
  };

  explicit Ledger(Options options);
  ~Ledger();
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // How a rank leaves the group.
  enum class Leave : std::uint8_t {
    together,  // waits some seconds for the other ranks to leave as well, because an engine that
               // closes its connections can take data away that a peer has not read yet
    at_once,
  };

  // Ends the threads and leaves. The destructor leaves at once if this was not called.
  void close(Leave leave);

  // Notes that this rank has made the call at this position.
  void arrive(std::uint64_t position);

  // Compares now; throws CommError (mismatch) if the first rank's call differs.
  void compare(const Entry& entry, const Deadline& deadline);

  // Compares soon, in the background.
  void compare_later(Entry entry);

  // Tells every rank of the fault. Returns the group's fault: this one, or one reported earlier.
  CommError::Details report(const CommError::Details& fault);

  // Finds the ranks that have not made the call at this position; with 0, only those that do not
  // answer.
  RollCall call_roll(std::uint64_t position);

 private:
  void write();   // the thread that compares in the background
  void listen();  // the thread that answers roll calls and hears of faults
  void thread_failed();
  void answer();
  void sweep(const Deadline& deadline);
  void leave(Leave leave);
  std::string key(const std::string& name) const { return options_.prefix + "/" + name; }

  const Options options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool faulty_ = false;
  std::vector<Entry> queue_;
  std::uint64_t arrived_ = 0;
  std::uint64_t compared_ = 0;
  std::uint64_t swept_ = 0;  // rank 0's writer only
  std::thread writer_;
  std::thread listener_;
};

}  // namespace lockstep::comm::backends
