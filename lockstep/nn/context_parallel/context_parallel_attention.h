// Self-attention with its projections, over a sequence whose positions are split among ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <lockstep/nn/context_parallel/context_parallel.h>
#include <lockstep/nn/layers/rotary.h>
#include <lockstep/nn/tensor_parallel/linear.h>

namespace lockstep::nn {

struct ContextParallelAttentionOptions {
  std::optional<std::int64_t> num_kv_heads;  // num_heads if not given
  bool causal = true;
  ContextAlgorithm algorithm = ContextAlgorithm::ring;
  SplitKind split = SplitKind::zigzag;
  std::optional<double> rotary_theta;  // no rotary positions if not given
  Bias bias = Bias::none;              // bias of all four projections
};

// Computes o(attention(q(x), k(x), v(x))) over the whole sequence. Each rank passes its part of x
// (take_part) and gets its part of the result.
//
// The weights are the same on every rank if the generator's seed is (torch::manual_seed): each rank
// draws them as torch::nn::Linear does. A rank's gradients are those of its own positions; the
// gradient of the whole sequence is their sum over the group, as it is over ranks with other
// samples. Data parallelism over the joint group of dp and cp sums both.
//
// Ownership: shares the group. Threading: as the group's calls, one thread at a time. Failure:
// UsageError for sizes that do not divide; else as context_parallel_attention().
class ContextParallelAttentionImpl : public torch::nn::Module {
 public:
  ContextParallelAttentionImpl(std::int64_t hidden_size, std::int64_t num_heads,
                               std::shared_ptr<comm::Communicator> group,
                               const ContextParallelAttentionOptions& options = {});

  at::Tensor forward(const at::Tensor& x);  // [batch, local length, hidden], as the result

  torch::nn::Linear q_proj{nullptr};
  torch::nn::Linear k_proj{nullptr};
  torch::nn::Linear v_proj{nullptr};
  torch::nn::Linear o_proj{nullptr};

 private:
  // [batch, local length, heads · head_dim] to [batch, heads, local length, head_dim].
  at::Tensor heads(const at::Tensor& projected) const;

  std::int64_t hidden_size_;
  std::int64_t head_dim_;
  std::shared_ptr<comm::Communicator> group_;
  ContextParallelAttentionOptions options_;
  std::optional<Rotary> rotary_;
};

TORCH_MODULE(ContextParallelAttention);

}  // namespace lockstep::nn
