// The interface everything above stands on: a fixed, ordered group of ranks that call the same
// operations in the same order.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/operations/operation.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::flight {
class Journal;
}

namespace lockstep::comm {

class WaitWatch;

// The members of a group, and its name.
struct GroupInfo {
  std::string name = "world";
  int rank = 0;                      // of this process, in the group
  std::vector<int> global_ranks{0};  // of each member, in the group's order
  std::uint32_t generation = 0;      // grows when an elastic job re-forms the group
  // Where the process writes what its groups did; null: a new one that writes nothing. A split's
  // groups have their parent's.
  std::shared_ptr<flight::Journal> journal = nullptr;
  // Why its backend is the one it is, for a person; empty where there was nothing to choose.
  std::string backend_reason = "";
  // Looks for ranks that wait for each other in different groups; null: nobody does. A split's
  // groups have their parent's.
  std::shared_ptr<WaitWatch> watch = nullptr;

  // An error of a call in this group, with the group's name and the job's numbers of its ranks.
  CommError error(CommError::Details details) const;
};

// Settings of one call.
struct CallOptions {
  // How long the call may take; the group's timeout where not given.
  std::optional<milliseconds> timeout;
  // The algorithm; the group's choice where automatic. The result does not depend on it.
  Algorithm algorithm = Algorithm::automatic;
  // When it starts.
  Launch launch = Launch::in_background;
  // A mean over tensors on the CPU divides by this instead of the number of ranks: one float64, the
  // same on all ranks. It is read when the call runs, so it may be the result of an
  // earlier call of the group that nobody has waited for. 0 leaves the sum as it is: the mean over
  // nothing is nothing.
  at::Tensor divisor;
  // The caller may number what its calls are about, from 0: ranks whose subjects differ are not in
  // the same call, and are told so. A broadcast has no subject.
  std::int32_t subject = -1;
};

// Whether an operation has an algorithm (automatic: always), and a UsageError where it has not.
bool has_algorithm(Operation operation, Algorithm algorithm);
void check_algorithm(Operation operation, Algorithm algorithm);

// A new group is told where the tensors of its calls will be: connecting GPUs takes time, and
// memory of theirs.
enum class GroupTensors : std::uint8_t {
  on_any_device,
  on_host,
};

// A rank's wish in a split.
struct SplitRequest {
  int color = 0;
  int key = 0;
  std::string name;
  std::uint64_t number =
      0;  // of the split in its parent group, from 1: tells groups of equal name apart
  GroupTensors tensors = GroupTensors::on_any_device;  // the same on all ranks
};

// All calls check their arguments, number the call, record it in the flight recorder and return at
// once. Tensors must be contiguous, of one dtype, on a device the backend takes; they must not be
// touched until the Work is waited for. Every rank of the group must make the same calls in the
// same order (exchange: the two ranks of each transfer).
//
// Threading: one thread at a time makes calls; any thread may wait or abort.
// Failure: UsageError for bad arguments, before anything is sent. Otherwise CommError, from the
// Work or from a later call; the group is then dead, on this rank and, as far as they can be
// reached, on all others, and only its destructor may follow.
class Communicator {
 public:
  using Where = CallSite;

  virtual ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return info_.rank; }
  int size() const { return static_cast<int>(info_.global_ranks.size()); }
  const std::string& name() const { return info_.name; }
  std::uint32_t generation() const { return info_.generation; }
  const std::vector<int>& global_ranks() const { return info_.global_ranks; }
  milliseconds timeout() const { return timeout_; }
  void set_timeout(milliseconds timeout) { timeout_ = timeout; }

  // The backend's name in the table (backends/table.h); with a lane for tensors on GPUs the lane's
  // in front: "nccl+shm".
  virtual std::string backend() const = 0;
  // The backend of that lane; empty where tensors on GPUs have none.
  const std::string& lane() const { return lane_; }
  // Why it is that one, for a person; empty where there was nothing to choose.
  const std::string& backend_reason() const { return info_.backend_reason; }

  // True where sums come in the canonical order, the same bits for every layout.
  virtual bool canonical_order() const = 0;

  // How many bytes this rank has sent to each rank of the group so far, in messages of the group's
  // calls, without what the medium adds to them; nothing where the backend leaves that to an engine
  // that does not say (nccl for tensors on GPUs, mpi, gloo). Groups made by split() count for
  // themselves. Any thread.
  virtual std::optional<std::vector<std::uint64_t>> sent_bytes() const = 0;

  // tensor ← reduction of all ranks' tensors. The list form is one call over all of them, which
  // may have different shapes but one dtype.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::sum, CallOptions options = {},
                  Where where = Where::current());
  Work all_reduce(std::vector<at::Tensor> tensors, ReduceOp op = ReduceOp::sum,
                  CallOptions options = {}, Where where = Where::current());

  // output ← all ranks' inputs, one after the other: output has size() times input's elements.
  Work all_gather(at::Tensor output, at::Tensor input, CallOptions options = {},
                  Where where = Where::current());
  // outputs[r] ← rank r's input, which may be of another length on every rank.
  Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input, CallOptions options = {},
                  Where where = Where::current());

  // output ← this rank's part of the reduction of all inputs: input has size() times output's
  // elements, part r goes to rank r.
  Work reduce_scatter(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::sum,
                      CallOptions options = {}, Where where = Where::current());
  // inputs[r] is what this rank adds to rank r's output; lengths may differ between ranks.
  Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs,
                      ReduceOp op = ReduceOp::sum, CallOptions options = {},
                      Where where = Where::current());

  // Part r of input goes to rank r; part r of output comes from rank r.
  Work all_to_all(at::Tensor output, at::Tensor input, CallOptions options = {},
                  Where where = Where::current());
  // inputs[r] goes to rank r, outputs[r] comes from rank r; any lengths that agree in pairs.
  Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs,
                  CallOptions options = {}, Where where = Where::current());

  // tensor ← root's tensor. The list form is one call over all of them.
  Work broadcast(at::Tensor tensor, int root, CallOptions options = {},
                 Where where = Where::current());
  Work broadcast(std::vector<at::Tensor> tensors, int root, CallOptions options = {},
                 Where where = Where::current());

  // Any number of sends and receives at once; between two ranks they match in order. Only the
  // ranks named in it take part.
  Work exchange(std::vector<Transfer> transfers, CallOptions options = {},
                Where where = Where::current());

  // Done on no rank before every rank has called it.
  Work barrier(CallOptions options = {}, Where where = Where::current());

  // Ranks with the same color form a new group, ordered by key and then by rank here. Every rank
  // calls it; a negative color takes part in the call and gets none (nullptr). Blocks; once the new
  // group connects, an abort() of this one no longer ends it, its deadline does.
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name,
                                      GroupTensors tensors = GroupTensors::on_any_device,
                                      Where where = Where::current());

  // CommError where the group has failed, its calls run on GPUs, and none of them has said so yet:
  // what only a stream has waited for (Work::wait) may be anything then. To be called once a result
  // is on the host, by the thread that makes calls.
  virtual void check_device_results() {}

  // Ends the group now: every call in flight or to come throws, here and on the other ranks.
  void abort(const std::string& reason);

  // A tensor in the host's memory that the backend reaches without a copy: the fast lane for
  // buffers that are communicated often. Every rank may call it on its own, at any time. Other
  // ranks write results into it: once the group has failed, one that was stopped in the middle of a
  // call may still do so when it goes on, so do not use the memory any more.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype);

  // The last calls of this group, for reports.
  flight::Recorder& recorder() { return *recorder_; }
  // The calls of all groups of this process; its program also writes there how far it is.
  flight::Journal& journal() const { return *info_.journal; }

 protected:
  Communicator(GroupInfo info, milliseconds timeout);

  void set_backend_reason(std::string reason) { info_.backend_reason = std::move(reason); }
  void set_lane(std::string lane) { lane_ = std::move(lane); }

  const GroupInfo& info() const { return info_; }
  // Outlives the communicator where a call does.
  std::shared_ptr<flight::Recorder> shared_recorder() const { return recorder_; }

 private:
  // Starts the call; everything about it has been checked. Must mark the call's flight entry as
  // started and finished.
  virtual std::shared_ptr<PendingCall> do_start(Call call) = 0;
  virtual std::shared_ptr<Communicator> do_split(const SplitRequest& request,
                                                 Deadline deadline) = 0;
  virtual void do_abort(const std::string& reason) = 0;
  virtual at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  // UsageError where the backend cannot take tensors of this device or dtype.
  virtual void do_check(Operation operation, const at::Tensor& tensor) const = 0;

  Work start(Call call, const CallOptions& options, const Where& where);
  void check(const at::Tensor& tensor, const char* what, Operation operation) const;
  void check(const std::vector<at::Tensor>& tensors, const char* what, Operation operation) const;
  void check_one_each(const std::vector<at::Tensor>& tensors, const char* what,
                      Operation operation) const;
  void check_multiple(const at::Tensor& whole, const at::Tensor& part, Operation operation) const;

  GroupInfo info_;
  milliseconds timeout_;
  std::string lane_;
  std::shared_ptr<flight::Recorder> recorder_;
  std::uint64_t sequence_ = 0;
  std::uint64_t splits_ = 0;
  std::vector<std::uint64_t> sent_;      // exchange messages to each rank so far
  std::vector<std::uint64_t> received_;  // and from each
};

}  // namespace lockstep::comm
