// ZeRO++'s collectives: weights and gradients travel in int8 or int4 blocks (codecs/), an eighth to
// a quarter of the bytes of floats.
//
//   quantized_all_gather(*group, weights, shard);                                        // qwZ
//   quantized_reduce_scatter(*group, shard_gradient, gradient, {.op = ReduceOp::mean});  // qgZ
//
// They are called by all ranks of a group in the same order as its other calls, with the same
// format, and block until the output is there. Tensors are contiguous and in the process's memory,
// Float, Half or BFloat16, input and output each of a type of its own; they may share memory.
// UsageError for other tensors and formats, before anything is sent; CommError as the group's own
// calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/comm/codecs/block_format.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::comm {

// output ← all ranks' inputs, one after the other, each as it comes back from its blocks. So is the
// rank's own: every rank has the same bits.
void quantized_all_gather(Communicator& group, const at::Tensor& output, const at::Tensor& input,
                          const BlockFormat& format = {.type = QuantizedType::int8});

struct QuantizedReduction {
  ReduceOp op = ReduceOp::sum;  // or mean
  BlockFormat format = {.type = QuantizedType::int4};
};

// output ← this rank's part of the sum or mean of all inputs: part r goes to rank r. Each value is
// quantized once, on its way from its rank, the rank's own too; then all are added as floats in the
// canonical order (algorithms/reduction_tree.h), and the sum is rounded to the output's type. The
// bits do not depend on the backend.
void quantized_reduce_scatter(Communicator& group, const at::Tensor& output,
                              const at::Tensor& input, const QuantizedReduction& reduction = {});

}  // namespace lockstep::comm
