// A Communicator over any engine for host memory: what such an engine has to do (HostEngine), and
// the rest, which is the same for all of them.
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

// Threads that run jobs which block: as many as there are jobs at once, kept for the next ones.
// Jobs start in the order they come; with `most` = 1 they also run one after the other. Jobs must
// not throw. The destructor runs what is queued and waits for all of it.
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

// The largest message that is given to an engine in one piece where its counts are ints.
inline constexpr std::int64_t kLargestPieceBytes = std::int64_t{1} << 30;

// What an engine for tensors in host memory has to be able to do; HostCommunicator makes the rest
// of our interface of it. It is one group of ranks, connected. All calls block until the result is
// there, or throw std::exception: what the engine says, or anything once the deadline has passed or
// after interrupt(). Tensors are flat, contiguous and in host memory; an engine that throws while
// it may still write to them keeps them.
//
// Threading: one thread makes the collective calls, in the same order on every rank; exchange and
// interrupt may come from any thread at any time.
class HostEngine {
 public:
  virtual ~HostEngine() = default;

  virtual std::string name() const = 0;

  // float32, float64, int32, int64 or uint8, in place.
  virtual void all_reduce(const at::Tensor& tensor, BasicOp op, const Deadline& deadline) = 0;
  // Bytes. output is as long as all ranks' inputs, which are equally long and at most
  // kLargestPieceBytes.
  virtual void all_gather(const at::Tensor& output, const at::Tensor& input,
                          const Deadline& deadline) = 0;
  // Bytes, in place.
  virtual void broadcast(const at::Tensor& tensor, int root, const Deadline& deadline) = 0;
  // Bytes; how many go to and come from each rank.
  virtual void all_to_all(const at::Tensor& output, const at::Tensor& input,
                          const std::vector<std::int64_t>& output_bytes,
                          const std::vector<std::int64_t>& input_bytes,
                          const Deadline& deadline) = 0;
  virtual void barrier(const Deadline& deadline) = 0;
  // Sequences are the transfers' numbers between the two ranks: equal on both sides, and messages
  // match by them in whatever order they are posted.
  virtual void exchange(const std::vector<Transfer>& transfers,
                        const std::vector<std::uint64_t>& sequences, const Deadline& deadline) = 0;

  // A new group; `child` says who is in it, null where this rank is in none. Called by every rank.
  virtual std::unique_ptr<HostEngine> split(const GroupInfo* child, int color, int key,
                                            const std::string& prefix,
                                            const Deadline& deadline) = 0;

  // Makes blocked calls throw, as soon as the engine can; nothing may be called afterwards.
  virtual void interrupt() = 0;
};

// Collectives run one after the other in a thread of its own, exchanges beside them, each in a
// thread that waits for it: an exchange that waits for its peer holds up nothing else.
//
// Owns the engine and the threads. The destructor returns once the engine's calls have ended; where
// some are still in flight it interrupts them.
class HostCommunicator final : public Communicator {
 public:
  // `engine` is null for a group of one. `options` name the ledger's mode (with_ledger). `prefix`
  // is where the group's keys are in the store, the same on every rank.
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

  // Runs `work` as that call: compared first, its failure is the group's.
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

// The prefix of a new group's keys: every rank's n-th group of that name, generation and membership
// has the same, and no other has it. UsageError where there is no store.
std::string claim_prefix(const GroupInfo& group, const std::string& backend,
                         const EngineOptions& options);

// Waits until every rank is here; CommError that names those that are not at the deadline.
void gather_ranks(const GroupInfo& group, const std::string& backend, store::Store& store,
                  const std::string& prefix, const Deadline& deadline);

}  // namespace lockstep::comm::backends
