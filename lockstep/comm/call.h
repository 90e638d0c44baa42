// A checked call, as a backend gets it.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/fingerprint.h>

namespace lockstep::comm {

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

// What inputs and outputs hold, by operation:
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
  std::uint64_t flight_entry = 0;  // what to give to the recorder when its state changes
};

// UsageError for a divisor (CallOptions) that is none, or whose call divides nothing by it.
void check_divisor(const at::Tensor& divisor, Operation operation, ReduceOp op, c10::Device device);

// What sums are divided by in the end. To be asked when the call runs, not before.
double divisor_of(ReduceOp op, const at::Tensor& divisor, int num_ranks);
inline double divisor_of(const Call& call, int num_ranks) {
  return divisor_of(call.fingerprint.reduce_op, call.divisor, num_ranks);
}

}  // namespace lockstep::comm
