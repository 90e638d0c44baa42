// A Communicator over any engine for host memory. HostEngine is what such an engine has to provide;
// HostCommunicator does the rest, which is the same for all of them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/backends/engine/carrier.h>
#include <lockstep/comm/backends/engine/engine_group.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm::backends {

// Threads for jobs that block: as many as there are jobs at once, kept for the next ones. Jobs
// start in the order in which they come; with `most` = 1 they also run one after the other. Jobs
// must not throw. The destructor runs the queued jobs and waits for all of them.
class WorkerPool {
 public:
  explicit WorkerPool(std::size_t most) : most_(most) {}
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  void submit(std::function<void()> job);

 private:
  void work();

  const std::size_t most_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  bool stopping_ = false;
};

// The largest message that an engine gets in one piece if its counts are ints.
inline constexpr std::int64_t kLargestPieceBytes = std::int64_t{1} << 30;

// The interface of an engine for tensors in host memory, from which HostCommunicator makes a
// Communicator. An engine is one connected group of ranks. All calls block until the result is
// there. They throw std::exception with the engine's own message, and may throw any once the
// deadline has passed or after interrupt(). Tensors are flat, contiguous and in host memory; an
// engine that throws while it may still write to them keeps them.
//
// Threading: one thread makes the collective calls, in the same order on every rank; exchange and
// interrupt may come from any thread at any time.
class HostEngine {
 public:
  virtual ~HostEngine() = default;

  virtual std::string name() const = 0;

  // `tensor` is float32, float64, int32, int64 or uint8, and is reduced in place.
  virtual void all_reduce(const at::Tensor& tensor, BasicOp op, const Deadline& deadline) = 0;
  // Tensors of bytes. `output` is as long as all ranks' inputs together; these are equally long, at
  // most kLargestPieceBytes each.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input,
                          const Deadline& deadline) = 0;
  // A tensor of bytes, in place.
  virtual void broadcast(const at::Tensor& tensor, int root, const Deadline& deadline) = 0;
  // Tensors of bytes, with the number of bytes that go to and come from each rank.
  virtual void all_to_all(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& output_bytes,
                          const std::vector<std::int64_t>& input_bytes,
                          const Deadline& deadline) = 0;
  virtual void barrier(const Deadline& deadline) = 0;
  // Sequences number the transfers between two ranks, equally on both sides: messages match by
  // them, in whatever order they are posted.
  virtual void exchange(const std::vector<Transfer>& transfers,
                        const std::vector<std::uint64_t>& sequences, const Deadline& deadline) = 0;

  // Makes a new group. `child` describes the group that this rank joins, null if it joins none.
  // Every rank calls it.
  virtual std::unique_ptr<HostEngine> split(const GroupInfo* child, int color, int key,
                                            const std::string& prefix,
                                            const Deadline& deadline) = 0;

  // Makes blocked calls throw, as soon as the engine can; nothing may be called afterwards.
  virtual void interrupt() = 0;
};

// Collectives run one after the other in a thread of the communicator's own. Each exchange runs
// beside them in another thread, so an exchange that waits for its peer holds up nothing else.
//
// Owns the engine and the threads. The destructor interrupts the calls that are still in flight and
// returns once they have ended.
class HostCommunicator final : public Communicator {
 public:
  // `engine` is null for a group of one. `options` name the ledger's mode (with_ledger). `prefix`
  // is where the group's keys are in the store, and is the same on every rank.
  HostCommunicator(GroupInfo info, std::string backend, std::unique_ptr<HostEngine> engine,
                   const EngineOptions& options, std::string prefix);
  ~HostCommunicator() override;

  std::string backend() const override { return backend_; }
  bool canonical_order() const override { return false; }
  std::optional<std::vector<std::uint64_t>> sent_bytes() const override { return std::nullopt; }

 private:
  std::shared_ptr<PendingCall> do_start(Call call) override;
  std::shared_ptr<Communicator> do_split(const SplitRequest& request, Deadline deadline) override;
  void do_abort(const std::string& reason) override;
  at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) override;
  void do_check(Operation operation, const at::Tensor& tensor) const override;

  // Compares the call with the other ranks', then runs `work` as that call. An exception fails the
  // group.
  void perform(EngineCall& call, const std::function<void()>& work);
  std::shared_ptr<Communicator> form(const SplitRequest& request, const Deadline& deadline);

  const std::string backend_;
  const EngineOptions options_;
  const std::string prefix_;
  std::unique_ptr<HostEngine> engine_;
  std::shared_ptr<EngineGroup> group_;
  std::unique_ptr<WorkerPool> collectives_;
  std::unique_ptr<WorkerPool> exchanges_;
};

// Returns the prefix of a new group's keys. The n-th group of a name, generation and membership
// gets the same prefix on every rank, and no other group has it. UsageError if there is no store.
std::string claim_prefix(const GroupInfo& group, const std::string& backend,
                         const EngineOptions& options);

// Waits until every rank is here. At the deadline, throws CommError with the missing ranks.
void gather_ranks(const GroupInfo& group, const std::string& backend, store::Store& store,
                  const std::string& prefix, const Deadline& deadline);

}  // namespace lockstep::comm::backends
