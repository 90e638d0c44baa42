// A call as a backend gets it (checked), as its caller waits for it (in flight), and the rules for
// its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm {

// A call in flight, which each backend implements. Thread-safe.
class PendingCall {
 public:
  virtual ~PendingCall() = default;

  // True once it has finished or failed; never blocks.
  virtual bool done() const = 0;

  // True once wait() would not block this thread; never blocks.
  virtual bool ready() const { return done(); }

  // Blocks until the call has finished and throws its failure, or CommError (timeout) at the
  // waiter's deadline or at the call's own, whichever comes first. After the waiter's deadline the
  // call goes on (shm, tcp, nccl) or, if the engine cannot abandon it (gloo, mpi), its group ends.
  virtual void wait_on_host(Deadline deadline) = 0;

  // Makes the current stream wait for the result, without blocking the host if the backend can do
  // that.
  virtual void wait() = 0;
};

// A handle to a call; copies refer to the same call. Dropping it neither cancels nor waits: the
// tensors stay alive until the call is over, and its failure is thrown by the next call of the
// group that is waited for.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<PendingCall> call) : call_(std::move(call)) {}

  bool done() const { return call_ == nullptr || call_->done(); }

  // Whether wait() would return at once. On a device that is before the result is there.
  bool ready() const { return call_ == nullptr || call_->ready(); }

  // Orders the current stream after the call: work that is enqueued on it later sees the result.
  // The CPU has no stream, so there it blocks until the result is there.
  void wait() {
    if (call_) call_->wait();
  }

  // Blocks this thread until the result is in memory.
  void wait_on_host() { wait_on_host(Deadline::never()); }
  void wait_on_host(Deadline deadline) {
    if (call_) call_->wait_on_host(deadline);
  }

 private:
  std::shared_ptr<PendingCall> call_;
};

// When a call starts to run.
enum class Launch : std::uint8_t {
  in_background,  // at once, beside the caller
  on_wait,        // in the thread that waits for it or for a later call: saves a thread's wake-up,
                  // for results that are needed at once
};

struct Transfer {
  enum class Direction : std::uint8_t { send, receive };
  Direction direction = Direction::send;
  int peer = 0;
  at::Tensor tensor;
};

inline Transfer send_to(int peer, at::Tensor tensor) {
  return {Transfer::Direction::send, peer, std::move(tensor)};
}
inline Transfer receive_from(int peer, at::Tensor tensor) {
  return {Transfer::Direction::receive, peer, std::move(tensor)};
}

// Inputs and outputs hold, by operation:
//   all_reduce, broadcast   outputs: the tensors, in place
//   all_gather              inputs: {mine}; outputs: {whole} or one for each rank
//   reduce_scatter          inputs: {whole} or one for each rank; outputs: {mine}
//   all_to_all              both {whole} or one for each rank
//   exchange                transfers, and for each its number in the pair's order
struct Call {
  Fingerprint fingerprint;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs;
  std::vector<Transfer> transfers;
  std::vector<std::uint64_t> transfer_sequences;
  Deadline deadline = Deadline::never();
  Launch launch = Launch::in_background;
  at::Tensor divisor;              // of a mean; undefined: the number of ranks
  std::uint64_t flight_entry = 0;  // the recorder's id for changes of its state
};

// Throws UsageError unless the call is a mean of tensors on the CPU and the divisor (CallOptions)
// is one float64 on the CPU.
void check_divisor(const at::Tensor& divisor, Operation operation, ReduceOp op, c10::Device device);

// The number that sums are divided by in the end. Call it when the call runs, not before.
double divisor_of(ReduceOp op, const at::Tensor& divisor, int num_ranks);
inline double divisor_of(const Call& call, int num_ranks) {
  return divisor_of(call.fingerprint.reduce_op, call.divisor, num_ranks);
}

// Translates between LibTorch's element types and ours. UsageError, with the supported types, if we
// have no such type.
DType dtype_of(c10::ScalarType type);

c10::ScalarType scalar_type_of(DType dtype);

// A call must not write the same memory twice, or read and write it: the result would depend on
// which comes first. This is checked before anything is sent.

// The output that may be exactly one input, because the rank's part of the input is already where
// the result puts it.
struct SamePlace {
  std::size_t output = 0;
  std::size_t input = 0;
};

// Throws UsageError if outputs overlap each other or an input. Inputs may overlap each other.
void check_overlap(Operation operation, const std::vector<at::Tensor>& outputs,
                   const std::vector<at::Tensor>& inputs, std::optional<SamePlace> same = {});

// Throws UsageError if `part` overlaps `whole` in any other way than as its part number `rank`.
void check_part(Operation operation, const at::Tensor& whole, const at::Tensor& part, int rank);

}  // namespace lockstep::comm
