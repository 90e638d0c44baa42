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
// Made, they quantize the input and start the group's call; waited for, they write the output. All
// ranks of a group make them in the same order as its other calls, with the same format and sizes.
//
// - Tensors are contiguous, Float, Half or BFloat16, input and output each of a type of its own, on
//   one device: the CPU or CUDA, with the same bits.
// - The input is read before the constructor returns; on CUDA that is put on the current stream. It
//   may be changed afterwards, and share memory with the output.
// - wait() does with streams what Work::wait() does: on CUDA the host goes on, and what comes later
//   on the current stream sees the output. A second wait() does nothing.
// - An inf or a nan makes its block of numbers nan for every rank that gets one of them: nothing
//   that is not finite becomes a number on its way.
//
// Owns its messages, whose memory is given back by wait(). One thread at a time. UsageError for
// tensors, formats and options that cannot be, before anything is sent; CommError as the group's
// own calls, after which it is of no more use.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// Tensors to messages of quantized blocks and back, where they lie: by vector code on the CPU, by
// kernels on CUDA, with the same bits.
//
// Tensors are contiguous, on one device; values are Float, Half or BFloat16. Messages are Byte,
// [number of messages, encoded_bytes(count of a part, format)]. On CUDA all is put on the current
// stream, and nothing waits. Autograd sees nothing of it. For any number of threads.

// UsageError where tensors on that device cannot be quantized, or not by this build.
void check_quantizes_on(c10::Device device);

void encode_parts(const BlockFormat& format, const at::Tensor& values, const PartTable& table,
                  const at::Tensor& messages);

// values ← sums of messages, in the canonical order, over the divisor.
void decode_sums(const BlockFormat& format, const at::Tensor& messages, const SumTable& table,
                 float divisor, const at::Tensor& values);

// Where messages get their memory: a flat Byte tensor of so many bytes, on the tensors' device,
// beginning at a multiple of 4. It is dropped when its last use is done, on CUDA when that is on
// the stream that wait() is called on. Not given: fresh memory of LibTorch's.
using TakeMemory = std::function<at::Tensor(std::int64_t bytes)>;

struct QuantizedGatherOptions {
  BlockFormat format = {.type = QuantizedType::int8};
  CallOptions call = {};
  TakeMemory memory = {};
};

// output ← all ranks' inputs, one after the other, each as it comes back from its blocks. So is the
// rank's own: every rank has the same bits. Dropped without wait(), it leaves the output alone.
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

// Does to a rank's own input what a gather does, and returns it in the type of the output.
at::Tensor quantized_and_back(const at::Tensor& input, at::ScalarType output_type,
                              const BlockFormat& format = {.type = QuantizedType::int8});

// A group as nodes of equally many ranks each: this rank's node, and the ranks that have its place
// in every node, in the nodes' order. It is rank across->rank() · inside->size() + inside->rank()
// of the group.
struct NodeGroups {
  std::shared_ptr<Communicator> inside;
  std::shared_ptr<Communicator> across;
};

// Each run of `ranks_per_node` consecutive ranks is a node. Every rank calls it, and gets groups of
// its own. UsageError where the group does not divide.
NodeGroups split_into_nodes(Communicator& group, int ranks_per_node);

struct QuantizedReductionOptions {
  ReduceOp op = ReduceOp::sum;  // or mean
  BlockFormat format = {.type = QuantizedType::int4};
  // A divisor is read by wait(): where it is the result of another group's call, or two hops are
  // made, that call has to be over by then.
  CallOptions call = {};
  TakeMemory memory = {};
};

// output ← this rank's part of the sum or mean of all inputs: part r goes to rank r. Messages are
// added as floats in the canonical order (algorithms/reduction.h), and the sum is rounded to
// the output's type. The bits do not depend on the backend.
//
// Over one group each value is quantized once, on its way from its rank, the rank's own too. Over
// nodes there are two hops: first the ranks of each node add up what they have for every rank of
// the same place as theirs, then those add up what the nodes have. Between nodes goes a message for
// each node instead of one for each rank; the node's sums are quantized once more on the way.
//
// It has to be waited for: other ranks wait for its second hop.
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

  // Waits for the first of two hops, as wait() does, and starts the second, for those who have
  // other work meanwhile; otherwise wait() does it. A call of `across` like others: all its ranks
  // make it in the same order. Does nothing a second time, or where there is one hop.
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
