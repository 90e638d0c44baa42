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
  std::optional<double> scale;  // 1/sqrt(head_dim) where not given
  ContextAlgorithm algorithm = ContextAlgorithm::ring;
  SplitKind split = SplitKind::zigzag;
};

// attention() over the whole sequence, of which each rank of the group passes its part of q [batch,
// heads, local length, head_dim], k and v [batch, kv_heads, local length, head_dim] and gets its
// part of the result, which lies in memory as attention()'s. heads is a multiple of kv_heads. On a
// group of one it is attention().
//
// Every rank calls it at the same point of its program with the same shapes, types and options, and
// runs backward at the same point; backward calls the group, too, and keeps it alive until then.
// The matrix of scores is never there as a whole (with all_to_all: where attention() keeps it so).
//
// UsageError for what a rank can see by itself; CommError that names the ranks and what this one
// passed where they disagree.
at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const std::shared_ptr<comm::Communicator>& group,
                                      const ContextParallelOptions& options = {});

// Splits a world into groups of cp_size ranks that are next to each other, and gives this rank's;
// every rank calls it. UsageError where the world does not divide.
std::shared_ptr<comm::Communicator> init_context_parallel_group(
    const std::shared_ptr<comm::Communicator>& world, int cp_size);

}  // namespace lockstep::nn
