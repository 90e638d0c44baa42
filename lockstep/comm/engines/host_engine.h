// What an engine for tensors in host memory has to be able to do; the rest of our interface is made
// of it (host_collectives.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/base/deadline.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/comm/engines/reduction.h>

namespace lockstep::comm::engines {

// The largest message that is given to an engine in one piece where its counts are ints.
inline constexpr std::int64_t kLargestPieceBytes = std::int64_t{1} << 30;

// One group of ranks, connected. All calls block until the result is there, or throw
// std::exception: what the engine says, or anything once the deadline has passed or after
// interrupt(). Tensors are flat, contiguous and in host memory; an engine that throws while it may
// still write to them keeps them.
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

}  // namespace lockstep::comm::engines
