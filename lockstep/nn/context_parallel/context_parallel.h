// Attention over a sequence whose positions are split among the ranks of a group.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/nn/context_parallel/sequence_split.h>

namespace lockstep::comm {
class Communicator;
}

namespace lockstep::nn {

struct ContextParallelOptions {
  bool causal = true;           // a query sees the keys up to its own position in the sequence
  std::optional<double> scale;  // 1/sqrt(head_dim) if not given
  ContextAlgorithm algorithm = ContextAlgorithm::ring;
  SplitKind split = SplitKind::zigzag;
};

// Computes attention() over the whole sequence. Each rank of the group passes its part of q [batch,
// heads, local length, head_dim], k and v [batch, kv_heads, local length, head_dim] and gets its
// part of the result, with the memory layout of attention()'s result. heads is a multiple of
// kv_heads. On a group of one it is attention().
//
// Every rank calls it at the same point of its program with the same shapes, types and options, and
// runs backward at the same point; backward calls the group, too, and keeps it alive until then.
// The matrix of scores is never in memory as a whole (with all_to_all: if attention() does not make
// it).
//
// UsageError for mistakes that a rank can see by itself; CommError, with the ranks and this rank's
// arguments, if the ranks disagree.
at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const std::shared_ptr<comm::Communicator>& group,
                                      const ContextParallelOptions& options = {});

// Splits a world into groups of cp_size consecutive ranks, and returns this rank's group; every
// rank calls it. UsageError if the world's size is no multiple of cp_size.
std::shared_ptr<comm::Communicator> init_context_parallel_group(
    const std::shared_ptr<comm::Communicator>& world, int cp_size);

}  // namespace lockstep::nn
