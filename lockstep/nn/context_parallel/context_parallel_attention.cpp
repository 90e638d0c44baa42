#include <lockstep/nn/context_parallel/context_parallel_attention.h>

#include <limits>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/comm/communicator.h>

namespace lockstep::nn {

ContextParallelAttentionImpl::ContextParallelAttentionImpl(
    std::int64_t hidden_size, std::int64_t num_heads, std::shared_ptr<comm::Communicator> group,
    const ContextParallelAttentionOptions& options)
    : hidden_size_(hidden_size), head_dim_(0), group_(std::move(group)), options_(options) {
  const auto kv_heads = options.num_kv_heads.value_or(num_heads);
  if (num_heads < 1 || hidden_size < 1 || hidden_size % num_heads != 0)
    throw UsageError("ContextParallelAttention: a width of {} does not divide into {} heads",
                     hidden_size, num_heads);
  if (kv_heads < 1 || num_heads % kv_heads != 0)
    throw UsageError("ContextParallelAttention: {} heads cannot share {} of keys and values: the "
                     "first must be a multiple of the second",
                     num_heads, kv_heads);
  if (group_ == nullptr) throw UsageError("ContextParallelAttention: there is no group");
  if (options.algorithm == ContextAlgorithm::all_to_all && num_heads % group_->size() != 0)
    throw UsageError("ContextParallelAttention: all_to_all gives each of {} ranks as many heads, "
                     "and {} do not divide by that. Use the ring, or a group whose size divides "
                     "the heads",
                     group_->size(), num_heads);
  head_dim_ = hidden_size / num_heads;
  if (options.rotary_theta)
    rotary_.emplace(head_dim_, std::numeric_limits<std::int64_t>::max() / 4, *options.rotary_theta);
  const auto linear = [&](std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(options.bias == Bias::added));
  };
  q_proj = register_module("q_proj", linear(hidden_size, hidden_size));
  k_proj = register_module("k_proj", linear(hidden_size, kv_heads * head_dim_));
  v_proj = register_module("v_proj", linear(hidden_size, kv_heads * head_dim_));
  o_proj = register_module("o_proj", linear(hidden_size, hidden_size));
}

at::Tensor ContextParallelAttentionImpl::heads(const at::Tensor& projected) const {
  return projected.unflatten(2, {projected.size(2) / head_dim_, head_dim_}).transpose(1, 2);
}

at::Tensor ContextParallelAttentionImpl::forward(const at::Tensor& x) {
  if (x.dim() != 3 || x.size(2) != hidden_size_)
    throw UsageError("ContextParallelAttention: the input needs three dimensions, [batch, local "
                     "length, {}], and has {}, the last of {}",
                     hidden_size_, x.dim(), x.dim() == 0 ? 0 : x.size(-1));
  auto q = heads(q_proj->forward(x));
  auto k = heads(k_proj->forward(x));
  const auto v = heads(v_proj->forward(x));
  if (rotary_) {
    const auto held =
        positions(x.size(1) * group_->size(),
                  {.rank = group_->rank(), .size = group_->size(), .kind = options_.split});
    q = rotary_->apply(q, held);
    k = rotary_->apply(k, held);
  }
  const auto output = context_parallel_attention(
      q, k, v, group_,
      {.causal = options_.causal, .algorithm = options_.algorithm, .split = options_.split});
  return o_proj->forward(output.transpose(1, 2).flatten(2));
}

}  // namespace lockstep::nn
