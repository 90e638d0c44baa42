#include <lockstep/nn/layers/attention.h>

#include <cmath>
#include <limits>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/version.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/layers/attention_blocks.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class BlockedAttention : public torch::autograd::Function<BlockedAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, bool causal, double scale) {
    const auto result = internal::attention_forward(q, k, v, {.causal = causal, .scale = scale});
    context->save_for_backward({q, k, v, result.output, result.log_sum_exp});
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    return result.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    intercept::refuse_double_backward("attention");
    const auto saved = context->get_saved_variables();
    auto [q, k, v] = internal::attention_backward(
        grads[0], saved[0], saved[1], saved[2], {.output = saved[3], .log_sum_exp = saved[4]},
        {.causal = context->saved_data["causal"].toBool(),
         .scale = context->saved_data["scale"].toDouble()});
    return {q, k, v, at::Tensor(), at::Tensor()};
  }
};

bool ours(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat;
}

// A mask of the keys that each query sees; the queries are the last positions of the keys'
// sequence.
at::Tensor seen_keys(const at::Tensor& q, const at::Tensor& k) {
  return at::ones({q.size(2), k.size(2)}, q.options().dtype(at::kBool)).tril(k.size(2) - q.size(2));
}

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 5)
#define LOCKSTEP_GROUPED_ATTENTION 1

// LibTorch chooses the fastest kernel that is there, cuDNN's or another, and keys that several
// heads of queries share stay as they are. Its own causal mask is aligned at the first key.
at::Tensor grouped_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             bool masked, double scale) {
  const bool square = q.size(2) == k.size(2);
  c10::optional<at::Tensor> seen;
  if (masked && !square) seen = seen_keys(q, k);
  return at::scaled_dot_product_attention(q, k, v, seen, 0.0, masked && square, scale,
                                          /*enable_gqa=*/q.size(1) != k.size(1));
}
#endif

// Attention for the other dtypes and devices.
at::Tensor library_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             bool causal, double scale) {
  // A single query sees every key, so it needs no mask.
  const bool masked = causal && q.size(2) > 1;
  const auto tokens_together = [](const at::Tensor& output) {
    return output.transpose(1, 2).contiguous().transpose(1, 2);
  };
#ifdef LOCKSTEP_GROUPED_ATTENTION
  // LibTorch has no kernel that shares keys in float32.
  if (q.is_cuda() && q.element_size() == 2)
    return tokens_together(grouped_attention(q, k, v, masked, scale));
#endif
  const auto group = k.size(1) == 0 ? 1 : q.size(1) / k.size(1);
  const auto keys = group == 1 ? k : k.repeat_interleave(group, 1);
  const auto values = group == 1 ? v : v.repeat_interleave(group, 1);
#if TORCH_VERSION_MAJOR >= 2
  // LibTorch's own causal mask is aligned at the first key. For as many queries as keys that makes
  // no difference, and it takes faster kernels.
  const bool square = masked && q.size(2) == k.size(2);
  // LibTorch's scale is 1/sqrt(head_dim), and LibTorch 2.0 takes no other.
  const double factor = scale * std::sqrt(static_cast<double>(q.size(3)));
  const auto scaled = std::abs(factor - 1.0) < 1e-12 ? q : q * factor;
  const auto output = masked && !square
                          ? at::scaled_dot_product_attention(scaled, keys, values, seen_keys(q, k))
                          : at::scaled_dot_product_attention(scaled, keys, values, {}, 0.0, square);
#else
  auto scores = at::matmul(q, keys.transpose(2, 3)) * scale;
  if (masked)
    scores =
        scores.masked_fill(seen_keys(q, k).logical_not(), -std::numeric_limits<double>::infinity());
  const auto output = at::matmul(scores.softmax(-1), values);
#endif
  return tokens_together(output);
}

}  // namespace

void internal::check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                               bool causal) {
  const auto shape = [](const at::Tensor& tensor) {
    return fmt::format("[{}]", fmt::join(tensor.sizes(), ", "));
  };
  if (q.dim() != 4 || k.dim() != 4 || v.dim() != 4)
    throw UsageError(
        "attention: q, k and v have the shapes {}, {} and {}: each needs four dimensions, [batch, "
        "heads, length, head_dim]",
        shape(q), shape(k), shape(v));
  if (k.sizes() != v.sizes() || k.size(0) != q.size(0) || k.size(3) != q.size(3))
    throw UsageError("attention: q has the shape {}, k {} and v {}: k and v must be the same, and "
                     "agree with q in "
                     "the first dimension (batch) and the last (head_dim)",
                     shape(q), shape(k), shape(v));
  if (q.size(1) != 0 && (k.size(1) == 0 || q.size(1) % k.size(1) != 0))
    throw UsageError("attention: {} heads of queries over {} of keys and values: the first must be "
                     "a multiple of "
                     "the second, so that each of those serves as many heads",
                     q.size(1), k.size(1));
  if (causal && q.size(2) > k.size(2))
    throw UsageError("attention: {} queries over {} keys, causal: the first {} would see no key. "
                     "Pass the keys of "
                     "every query, or causal = false",
                     q.size(2), k.size(2), q.size(2) - k.size(2));
  if (q.scalar_type() != k.scalar_type() || q.scalar_type() != v.scalar_type() ||
      q.device() != k.device() || q.device() != v.device())
    throw UsageError("attention: q is {} on {}, k {} on {} and v {} on {}: they must be alike",
                     c10::toString(q.scalar_type()), q.device().str(),
                     c10::toString(k.scalar_type()), k.device().str(),
                     c10::toString(v.scalar_type()), v.device().str());
}

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionOptions& options) {
  internal::check_attention(q, k, v, options.causal);
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  if (ours(q)) return BlockedAttention::apply(q, k, v, options.causal, scale);
  return library_attention(q, k, v, options.causal, scale);
}

}  // namespace lockstep::nn
