// The interface of every group: a fixed, ordered set of ranks that call the same operations in the
// same order.
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
  int rank = 0;                      // this process's place in the group
  std::vector<int> global_ranks{0};  // every member's rank in the job, in the group's order
  std::uint32_t generation = 0;      // grows when an elastic job re-forms the group
  // The journal of the process's groups; null makes a new one that writes nothing. Groups made by
  // split() share their parent's.
  std::shared_ptr<flight::Journal> journal = nullptr;
  // Why this backend was chosen, as text for a log; empty if there was no choice.
  std::string backend_reason = "";
  // Finds ranks that wait for each other in different groups; null if nobody does. Groups made by
  // split() share their parent's.
  std::shared_ptr<WaitWatch> watch = nullptr;

  // Makes the error of a call in this group, with the group's name and the ranks' numbers in the
  // job.
  CommError error(CommError::Details details) const;
};

// Settings of one call.
struct CallOptions {
  // How long the call may take; the group's timeout if not given.
  std::optional<milliseconds> timeout;
  // The algorithm; the group's choice if automatic. The result does not depend on it.
  Algorithm algorithm = Algorithm::automatic;
  // When the call starts to run.
  Launch launch = Launch::in_background;
  // A mean over tensors on the CPU divides by this instead of the number of ranks: one float64, the
  // same on all ranks. It is read when the call runs, so it may be the result of an earlier call of
  // the group that has not been waited for. 0 leaves the sum undivided: the mean of no values is
  // then 0.
  at::Tensor divisor;
  // A number from 0 for the subject of the call, such as a bucket: ranks whose subjects differ are
  // not in the same call, and the mismatch is reported. A broadcast has no subject.
  std::int32_t subject = -1;
};

// Whether an operation has an algorithm (`automatic`: always); check_algorithm() throws UsageError
// if it has not.
bool has_algorithm(Operation operation, Algorithm algorithm);
void check_algorithm(Operation operation, Algorithm algorithm);

// The devices of the tensors in a new group's calls. Connecting GPUs takes time and GPU memory, so
// a group that does not need it can say so.
enum class GroupTensors : std::uint8_t {
  on_any_device,
  on_host,
};

// One rank's part in a split.
struct SplitRequest {
  int color = 0;
  int key = 0;
  std::string name;
  std::uint64_t number =
      0;  // number of the split in its parent group, from 1: tells groups of equal name apart
  GroupTensors tensors = GroupTensors::on_any_device;  // the same on all ranks
};

// Every call checks its arguments, gets a number, is recorded in the flight recorder and returns at
// once. Tensors must be contiguous, of one dtype, on a device the backend takes; they must not be
// touched until the Work is waited for. Every rank of the group must make the same calls in the
// same order (exchange: the two ranks of each transfer).
//
// Threading: one thread at a time makes calls; any thread may wait or abort. Failure: UsageError
// for bad arguments, before anything is sent. Otherwise CommError, from the Work or from a later
// call. The group is then dead on this rank, and on all other ranks that can be reached; only its
// destructor may follow.
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

  // The backend's name in the table (backends/table.h); if tensors on GPUs have a lane, the lane's
  // name comes first: "nccl+shm".
  virtual std::string backend() const = 0;
  // The backend of the lane for tensors on GPUs; empty if there is none.
  const std::string& lane() const { return lane_; }
  // Why this backend was chosen, as text for a log; empty if there was no choice.
  const std::string& backend_reason() const { return info_.backend_reason; }

  // True if sums come in the canonical order, with the same bits for every layout.
  virtual bool canonical_order() const = 0;

  // How many bytes this rank has sent to each rank of the group so far, counting the messages of
  // the group's calls but not what the medium adds to them. Nothing if the backend leaves that to
  // an engine that does not count (nccl for tensors on GPUs, mpi, gloo). Groups made by split()
  // count for themselves. Any thread may call it.
  virtual std::optional<std::vector<std::uint64_t>> sent_bytes() const = 0;

  // tensor ← reduction of all ranks' tensors. The list form is one call over all of its tensors,
  // which may have different shapes but one dtype.
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

  // output ← this rank's part of the reduction of all inputs: the input has size() times the
  // output's elements, and part r goes to rank r.
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

  // tensor ← root's tensor. The list form is one call over all of its tensors.
  Work broadcast(at::Tensor tensor, int root, CallOptions options = {},
                 Where where = Where::current());
  Work broadcast(std::vector<at::Tensor> tensors, int root, CallOptions options = {},
                 Where where = Where::current());

  // Makes any number of sends and receives at once; between two ranks they match in order. Only the
  // ranks named in the transfers take part.
  Work exchange(std::vector<Transfer> transfers, CallOptions options = {},
                Where where = Where::current());

  // Ends on no rank before every rank has called it.
  Work barrier(CallOptions options = {}, Where where = Where::current());

  // Ranks with the same color form a new group, ordered by key and then by their rank here. Every
  // rank calls it; a rank with a negative color takes part in the call and gets nullptr. Blocks.
  // Once the new group connects, abort() of this one no longer ends the call; its deadline does.
  std::shared_ptr<Communicator> split(int color, int key, const std::string& name,
                                      GroupTensors tensors = GroupTensors::on_any_device,
                                      Where where = Where::current());

  // Throws CommError if the group has failed in calls that run on GPUs and no call has thrown the
  // failure yet: results for which only a stream has waited (Work::wait) may be wrong then. Call it
  // once a result is on the host, from the thread that makes calls.
  virtual void check_device_results() {}

  // Ends the group now: every call in flight and every later one throws, here and on the other
  // ranks.
  void abort(const std::string& reason);

  // Says that this rank throws an error instead of going on to its next call, whichever group's
  // that is. Ranks that wait for it on the host fail within seconds, with this reason; unless they
  // have all thrown as many such errors, and so wait for nobody. Ends with this rank's next call.
  void note_refusal(const std::string& reason) const;

  // Returns a tensor in the host's memory that the backend reaches without a copy, for buffers that
  // are communicated often. Every rank may call it by itself, at any time. Other ranks write
  // results into this memory: after the group has failed, a rank that was stopped in the middle of
  // a call may still do so when it goes on, so do not use the memory any more.
  at::Tensor allocate(at::IntArrayRef sizes, at::ScalarType dtype);

  // The group's last calls, for reports.
  flight::Recorder& recorder() { return *recorder_; }
  // The calls of all groups of this process. The program also notes its progress there.
  flight::Journal& journal() const { return *info_.journal; }

 protected:
  Communicator(GroupInfo info, milliseconds timeout);

  void set_backend_reason(std::string reason) { info_.backend_reason = std::move(reason); }
  void set_lane(std::string lane) { lane_ = std::move(lane); }

  const GroupInfo& info() const { return info_; }
  // Lives longer than the communicator if a call does.
  std::shared_ptr<flight::Recorder> shared_recorder() const { return recorder_; }

 private:
  // Starts the call; all arguments have been checked. Must mark the call's flight entry as started
  // and finished.
  virtual std::shared_ptr<PendingCall> do_start(Call call) = 0;
  virtual std::shared_ptr<Communicator> do_split(const SplitRequest& request,
                                                 Deadline deadline) = 0;
  virtual void do_abort(const std::string& reason) = 0;
  virtual at::Tensor do_allocate(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
  // Throws UsageError if the backend cannot take tensors of this device or dtype.
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
  std::vector<std::uint64_t> received_;  // exchange messages from each rank so far
};

}  // namespace lockstep::comm
