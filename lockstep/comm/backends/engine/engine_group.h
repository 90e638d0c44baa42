// What every engine's communicator shares with its calls: who is alive, what has failed, and how a
// failure reaches everyone who waits.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/backends/engine/ledger.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/transport/wait_watch.h>
#include <lockstep/store/store.h>

namespace lockstep::comm::backends {

// Returns what an engine says, without the addresses of stack frames that LibTorch's exceptions
// carry.
inline std::string engine_text(const std::string& what) {
  return what.substr(0, what.find("\nException raised from"));
}

// A timeout for engines that cannot do without one: deadlines are kept by us.
inline constexpr milliseconds kNever = std::chrono::hours(24 * 365);

// When the ledger compares a call between ranks (see ledger.h).
enum class LedgerMode : std::uint8_t {
  automatic,  // what the engine needs: `before` for Gloo, `beside` for MPI
  before,     // a rank takes part in a call only after comparing it: no wrong number is ever made,
              // at the price of one round to the store
  beside,     // in the background: costs the call nothing; a mismatch is found some milliseconds
              // later and thrown by this call's Work or by a later call
};

// An engine starts from these, beside the group it is for.
struct EngineOptions {
  // The job's store: where engines find each other and the ledger is kept. Only mpi does without:
  // its rank 0 then hosts one.
  std::shared_ptr<store::Store> store;
  // How long setting up, and any call that says nothing else, may take.
  milliseconds timeout{300'000};
  // The address of this host that the engine's listeners bind to (gloo; mpi's own store).
  std::string bind_address = "127.0.0.1";
  LedgerMode ledger = LedgerMode::automatic;

  // The same, with what the engine needs where the mode was left to it.
  EngineOptions with_ledger(LedgerMode needed) const {
    EngineOptions options = *this;
    if (ledger == LedgerMode::automatic) options.ledger = needed;
    return options;
  }
};

class EngineGroup;

// A call of an engine: finished by the engine's thread, failed by the group. Thread-safe; may
// outlive the communicator.
class EngineCall : public PendingCall, public std::enable_shared_from_this<EngineCall> {
 public:
  EngineCall(std::shared_ptr<EngineGroup> group, Call call, std::uint64_t position);

  bool done() const override;
  void wait_on_host(Deadline deadline) override;
  void wait() override;

  const Call& call() const { return call_; }
  std::uint64_t position() const { return position_; }
  // The ranks an exchange is with.
  const std::vector<int>& peers() const { return peers_; }
  bool overdue() const { return call_.deadline.passed() && !done(); }

  void start();
  void finish();
  void fail(const CommError::Details& fault);

 private:
  const std::shared_ptr<EngineGroup> group_;
  Call call_;  // lets go of its tensors once finished
  const std::uint64_t position_;
  const std::vector<int> peers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::optional<CommError::Details> fault_;
};

// Shared by a communicator and its calls. Thread-safe. A group fails once: the fault is agreed on
// with the other ranks through the ledger where that can be, every call in flight is failed with
// it, and the engine is interrupted.
class EngineGroup : public std::enable_shared_from_this<EngineGroup> {
 public:
  EngineGroup(GroupInfo info, std::string backend, std::shared_ptr<flight::Recorder> recorder,
              LedgerMode mode);

  // Starts the ledger (groups of one need none). `interrupt` makes the engine's blocked threads
  // throw, as far as the engine can; `tick` is called every few milliseconds.
  void open(const EngineOptions& options, const std::string& prefix,
            std::function<void()> interrupt, std::function<void()> tick);
  // Ends the ledger and fails what is still in flight.
  void close();

  const GroupInfo& info() const { return info_; }
  int size() const { return static_cast<int>(info_.global_ranks.size()); }
  bool dead() const;
  // CommError where the group has failed, or where an earlier call is past its deadline.
  void check_alive(const char* operation);

  // A new call. Its position in the group's order is counted here; exchanges have none.
  std::shared_ptr<EngineCall> begin(Call call);
  void track(std::shared_ptr<EngineCall> call);
  void forget(const EngineCall* call);
  // In `before` mode: returns once the call was compared; CommError where it differs.
  void compare(const EngineCall& call);

  // A split takes a place in the order of calls too.
  std::shared_ptr<EngineCall> begin_split(const SplitRequest& request, Deadline deadline);

  // The group fails with what the engine threw in this call.
  void engine_failed(const EngineCall& call, const std::string& text);
  // The group fails because this call is not over after so many seconds.
  void time_out(const EngineCall& call, double seconds);
  // The group fails with this, unless it has failed before.
  void fail(CommError::Details fault);

  flight::Recorder& recorder() { return *recorder_; }
  void mark(const Call& call, flight::State state) {
    if (call.flight_entry != 0) recorder_->mark(call.flight_entry, state);
  }

 private:
  std::vector<Ledger::Entry> entries(const Call& call, std::uint64_t position) const;
  CommError::Details describe(const Call& call, Fault fault) const;
  void die(const CommError::Details& fault);
  void check_deadlines();
  // The fault that the watch has found, if any.
  std::optional<CommError::Details> verdict() const;

  const GroupInfo info_;
  const std::string backend_;
  const std::shared_ptr<flight::Recorder> recorder_;
  const LedgerMode mode_;
  std::function<void()> interrupt_;
  std::unique_ptr<Ledger> ledger_;

  mutable std::mutex mutex_;
  std::optional<CommError::Details> fault_;
  std::unique_ptr<WaitWatch::Watched> watched_;
  std::list<std::shared_ptr<EngineCall>> in_flight_;
  std::atomic<std::uint64_t> position_{0};
};

}  // namespace lockstep::comm::backends
