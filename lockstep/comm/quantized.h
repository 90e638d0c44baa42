// ZeRO++'s collectives: weights and gradients travel in int8 or int4 blocks (codecs/), an eighth to
// a quarter of the bytes of floats.
//
//   QuantizedGather gather(*group, weights, shard);                                      // qwZ
//   QuantizedReduceScatter reduction(nodes, shard_gradient, gradient,                    // qgZ
//                                    {.op = ReduceOp::mean});
//   …  // other work meanwhile
//   gather.wait();
//   reduction.wait();
//
// The constructor quantizes the input and starts the group's call; wait() writes the output. All
// ranks of a group make these objects in the same order as its other calls, with the same format
// and sizes.
//
// - Tensors are contiguous, on one device: the CPU or CUDA, with the same bits. Input and output
//   are Float, Half or BFloat16, and may have different types.
// - The input is read before the constructor returns, on CUDA in the current stream. It may be
//   changed afterwards, and may share memory with the output.
// - wait() treats streams as Work::wait() does: on CUDA the host goes on, and later work on the
//   current stream sees the output. A second wait() does nothing.
// - An inf or a nan makes its whole block of numbers nan on every rank that receives any of them,
//   so it never becomes a number on its way.
//
// Owns its messages; wait() gives their memory back. One thread at a time uses it. Throws
// UsageError for invalid tensors, formats and options before anything is sent, and CommError as the
// group's own calls do, after which it cannot be used any more.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// Converts tensors to messages of quantized blocks and back, on the device where they are: with
// vector code on the CPU and kernels on CUDA, with the same bits.
//
// Tensors are contiguous, on one device; values are Float, Half or BFloat16. Messages are Byte,
// [number of messages, encoded_bytes(count of a part, format)]. On CUDA all work goes to the
// current stream, and nothing waits. Autograd does not record it. Any number of threads may call
// these.

// Throws UsageError if tensors on that device cannot be quantized, or not by this build.
void check_quantizes_on(c10::Device device);

void encode_parts(const BlockFormat& format, const at::Tensor& values, const PartTable& table,
                  const at::Tensor& messages);

// values ← sums of messages in the canonical order, divided by the divisor.
void decode_sums(const BlockFormat& format, const at::Tensor& messages, const SumTable& table,
                 float divisor, const at::Tensor& values);

// Allocates the memory of messages: a flat Byte tensor of so many bytes, on the tensors' device,
// beginning at a multiple of 4. The tensor is released after its last use; on CUDA that is on the
// stream on which wait() is called. If not given, LibTorch allocates fresh memory.
using TakeMemory = std::function<at::Tensor(std::int64_t bytes)>;

struct QuantizedGatherOptions {
  BlockFormat format = {.type = QuantizedType::int8};
  CallOptions call = {};
  TakeMemory memory = {};
};

// output ← all ranks' inputs, one after the other, each as it comes back from its blocks. The
// rank's own input is quantized, too, so that every rank has the same bits. If it is destroyed
// without wait(), the output stays as it was.
class QuantizedGather {
 public:
  QuantizedGather(Communicator& group, at::Tensor output, const at::Tensor& input,
                  const QuantizedGatherOptions& options = {},
                  Communicator::Where where = Communicator::Where::current());
  QuantizedGather(QuantizedGather&&) = default;
  QuantizedGather& operator=(QuantizedGather&&) = default;

  bool done() const { return work_.done(); }
  void wait();

 private:
  BlockFormat format_;
  at::Tensor output_;
  at::Tensor messages_;  // [ranks, bytes]; undefined once waited for
  Work work_;
};

// Quantizes a rank's own input and decodes it to the type of the output, as a gather does.
at::Tensor quantized_and_back(const at::Tensor& input, at::ScalarType output_type,
                              const BlockFormat& format = {.type = QuantizedType::int8});

// A group as nodes of equally many ranks each: this rank's node, and the ranks that have its place
// in every node, in the nodes' order. It is rank across->rank() · inside->size() + inside->rank()
// of the group.
struct NodeGroups {
  std::shared_ptr<Communicator> inside;
  std::shared_ptr<Communicator> across;
};

// Makes a node of each run of `ranks_per_node` consecutive ranks. Every rank calls it, and gets
// groups of its own. UsageError if the group's size is no multiple of that.
NodeGroups split_into_nodes(Communicator& group, int ranks_per_node);

struct QuantizedReductionOptions {
  ReduceOp op = ReduceOp::sum;  // sum or mean
  BlockFormat format = {.type = QuantizedType::int4};
  // wait() reads the divisor: if that is the result of another group's call, or if there are two
  // hops, its call has to be over by then.
  CallOptions call = {};
  TakeMemory memory = {};
};

// output ← this rank's part of the sum or mean of all inputs: part r goes to rank r. Messages are
// added as floats in the canonical order (algorithms/reduction.h), and the sum is rounded to
// the output's type. The bits do not depend on the backend.
//
// Over one group each value is quantized once, before it is sent; the rank's own values are
// quantized, too. Over nodes there are two hops: first each rank adds up, within its node, the
// parts for all ranks that have its place in their nodes; then the ranks of the same place add up
// the nodes' sums. So one message for each node crosses the network instead of one for each rank,
// and the nodes' sums are quantized once more on the way.
//
// wait() has to be called, because other ranks wait for this rank's second hop.
class QuantizedReduceScatter {
 public:
  QuantizedReduceScatter(Communicator& group, at::Tensor output, const at::Tensor& input,
                         const QuantizedReductionOptions& options = {},
                         Communicator::Where where = Communicator::Where::current());
  QuantizedReduceScatter(const NodeGroups& nodes, at::Tensor output, const at::Tensor& input,
                         const QuantizedReductionOptions& options = {},
                         Communicator::Where where = Communicator::Where::current());
  QuantizedReduceScatter(QuantizedReduceScatter&&) = default;
  QuantizedReduceScatter& operator=(QuantizedReduceScatter&&) = default;

  // Waits for the first of two hops, as wait() does, and starts the second, for callers that have
  // other work meanwhile; otherwise wait() does it. It is a call of `across` like others: all ranks
  // of that group make it in the same order. Does nothing a second time, or if there is only one
  // hop.
  void start_second_hop();

  // Whether start_second_hop() and then wait() would return at once.
  bool ready() const { return work_.ready(); }
  bool done() const { return second_ == nullptr && work_.done(); }
  void wait();

 private:
  void start(Communicator& first, std::int64_t num_nodes, const at::Tensor& input);

  QuantizedReductionOptions options_;
  Communicator::Where where_;
  int num_ranks_ = 0;
  std::shared_ptr<Communicator> second_;  // until its hop has started
  at::Tensor output_;
  at::Tensor sent_;      // [ranks, bytes]
  at::Tensor received_;  // [ranks, bytes], [nodes, bytes] in the second hop; undefined in the end
  Work work_;
};

}  // namespace lockstep::comm
