// The state that every engine's communicator shares with its calls: which ranks are alive, what has
// failed, and how a failure reaches every thread that waits.
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
#include <lockstep/comm/backends/table.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/transport/wait_watch.h>
#include <lockstep/store/store.h>

namespace lockstep::comm::backends {

// Returns an engine's message without the addresses of stack frames that LibTorch's exceptions
// carry.
inline std::string engine_text(const std::string& what) {
  return what.substr(0, what.find("\nException raised from"));
}

// A timeout for engines that insist on one. Deadlines are kept here, not in the engine.
inline constexpr milliseconds kNever = std::chrono::hours(24 * 365);

// Options with which an engine is started, in addition to its group.
struct EngineOptions {
  // The job's store, where engines find each other and keep the ledger. Only mpi works without one:
  // its rank 0 then hosts a store.
  std::shared_ptr<store::Store> store;
  // How long setting up may take, and any call without a timeout of its own.
  milliseconds timeout{300'000};
  // The address of this host that the engine's listeners bind to (gloo; mpi's own store).
  std::string bind_address = "127.0.0.1";
  LedgerMode ledger = LedgerMode::automatic;

  // Returns these options with the mode that the engine needs in place of LedgerMode::automatic.
  EngineOptions with_ledger(LedgerMode needed) const {
    EngineOptions options = *this;
    if (ledger == LedgerMode::automatic) options.ledger = needed;
    return options;
  }
};

class EngineGroup;

// A call of an engine: the engine's thread finishes it, or its group fails it. Thread-safe; may
// outlive the communicator.
class EngineCall : public PendingCall, public std::enable_shared_from_this<EngineCall> {
 public:
  EngineCall(std::shared_ptr<EngineGroup> group, Call call, std::uint64_t position);

  bool done() const override;
  void wait_on_host(Deadline deadline) override;
  void wait() override;

  const Call& call() const { return call_; }
  std::uint64_t position() const { return position_; }
  // The ranks that an exchange sends to or receives from.
  const std::vector<int>& peers() const { return peers_; }
  bool overdue() const { return call_.deadline.passed() && !done(); }

  void start();
  void finish();
  void fail(const CommError::Details& fault);

 private:
  const std::shared_ptr<EngineGroup> group_;
  Call call_;  // releases its tensors once finished
  const std::uint64_t position_;
  const std::vector<int> peers_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::optional<CommError::Details> fault_;
};

// Shared by a communicator and its calls. Thread-safe. A group fails once: the ranks agree on the
// fault through the ledger if they can, every call in flight fails with it, and the engine is
// interrupted.
class EngineGroup : public std::enable_shared_from_this<EngineGroup> {
 public:
  EngineGroup(GroupInfo info, std::string backend, std::shared_ptr<flight::Recorder> recorder,
              LedgerMode mode);

  // Starts the ledger, which groups of one do not need. `interrupt` makes the engine's blocked
  // threads throw, as far as the engine can; `tick` is called every few milliseconds.
  void open(const EngineOptions& options, const std::string& prefix,
            std::function<void()> interrupt, std::function<void()> tick);
  // Ends the ledger and fails the calls that are still in flight.
  void close();

  const GroupInfo& info() const { return info_; }
  int size() const { return static_cast<int>(info_.global_ranks.size()); }
  bool dead() const;
  // Throws CommError if the group has failed, or if an earlier call is past its deadline.
  void check_alive(const char* operation);

  // Makes a new call and gives it the next position in the group's order. Exchanges have no
  // position.
  std::shared_ptr<EngineCall> begin(Call call);
  void track(std::shared_ptr<EngineCall> call);
  void forget(const EngineCall* call);
  // In `before` mode: returns once the call was compared; throws CommError if it differs.
  void compare(const EngineCall& call);

  // A split takes a position in the order of calls, too.
  std::shared_ptr<EngineCall> begin_split(const SplitRequest& request, Deadline deadline);

  // Fails the group with what the engine threw in this call.
  void engine_failed(const EngineCall& call, const std::string& text);
  // Fails the group because this call is not over after so many seconds.
  void time_out(const EngineCall& call, double seconds);
  // Fails the group with this fault, unless it has failed before.
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
  // The circle of waiting ranks that the watch has found, if any.
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
