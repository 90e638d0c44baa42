// A Communicator over any engine for host memory.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/engine_group.h>
#include <lockstep/comm/engines/engine_options.h>
#include <lockstep/comm/engines/host_engine.h>
#include <lockstep/comm/engines/worker_pool.h>

namespace lockstep::comm::engines {

// Collectives run one after the other in a thread of its own, exchanges beside them, each in a
// thread that waits for it: an exchange that waits for its peer holds up nothing else.
//
// Owns the engine and the threads. The destructor returns once the engine's calls have ended; where
// some are still in flight it interrupts them.
class HostCommunicator final : public Communicator {
 public:
  // `engine` is null for a group of one. `prefix` is where the group's keys are in the store, the
  // same on every rank.
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

}  // namespace lockstep::comm::engines
