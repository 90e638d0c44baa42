#include <lockstep/nn/context_parallel.h>

#include <cmath>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/nn/all_to_all_attention.h>
#include <lockstep/nn/attention.h>
#include <lockstep/nn/communicator_capsule.h>
#include <lockstep/nn/once_differentiable.h>
#include <lockstep/nn/ring_attention.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What the ranks must agree on, and how their calls are compared for it.
struct Agreement {
  std::string text;

  std::int32_t subject() const { return static_cast<std::int32_t>(hash_text(text) & 0x7fffffff); }

  // Runs what calls the group; a mismatch is told with what this rank passed.
  template <typename Body>
  auto run(const Body& body) const {
    try {
      return body();
    } catch (const CommError& error) {
      if (error.fault() != Fault::mismatch) throw;
      auto details = error.details();
      details.explanation += fmt::format(
          " context_parallel_attention has {} on this rank: every rank of the group must pass the "
          "same shapes (of its part of the sequence), types and options",
          text);
      throw CommError(std::move(details));
    }
  }
};

class RingAttention : public torch::autograd::Function<RingAttention> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const std::shared_ptr<comm::Communicator>& group,
                            bool causal, double scale, SplitKind split,
                            const std::string& agreement) {
    const Agreement agreed{agreement};
    const auto result = agreed.run([&] {
      return internal::ring_forward(q, k, v, *group,
                                    {.attention = {.causal = causal, .scale = scale},
                                     .split = split,
                                     .subject = agreed.subject()});
    });
    // No copy where the sums are of its type; else one that lies in memory alike.
    const auto output = result.output.to(q.scalar_type());
    context->save_for_backward({q, k, v, output, result.log_sum_exp});
    auto& saved = context->saved_data;
    saved["group"] = internal::kept(group);
    saved["causal"] = causal;
    saved["scale"] = scale;
    saved["split"] = static_cast<std::int64_t>(split);
    saved["agreement"] = agreement;
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    internal::refuse_double_backward("context_parallel_attention");
    const auto tensors = context->get_saved_variables();
    auto& saved = context->saved_data;
    const Agreement agreed{saved["agreement"].toStringRef()};
    const auto group = internal::kept_group(saved["group"]);
    const auto [q, k, v] = agreed.run([&] {
      return internal::ring_backward(
          grads[0], tensors[0], tensors[1], tensors[2],
          {.output = tensors[3], .log_sum_exp = tensors[4]}, *group,
          {.attention = {.causal = saved["causal"].toBool(), .scale = saved["scale"].toDouble()},
           .split = static_cast<SplitKind>(saved["split"].toInt()),
           .subject = agreed.subject()});
    });
    const auto type = tensors[0].scalar_type();
    return {q.to(type), k.to(type), v.to(type), {}, {}, {}, {}, {}};
  }
};

void check_parts(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                 const comm::Communicator& group, const ContextParallelOptions& options) {
  internal::check_attention(q, k, v, /*causal=*/false);
  if (!q.is_floating_point())
    throw UsageError("context_parallel_attention: q, k and v are {}: they must be of a floating "
                     "type",
                     c10::toString(q.scalar_type()));
  if (q.size(1) == 0)
    throw UsageError("context_parallel_attention: there are no heads in q, which has the shape "
                     "[{}]",
                     fmt::join(q.sizes(), ", "));
  if (q.size(2) != k.size(2))
    throw UsageError("context_parallel_attention: {} queries over {} keys on this rank: each rank "
                     "passes the queries, keys and values of the same positions",
                     q.size(2), k.size(2));
  if (options.split == SplitKind::zigzag && q.size(2) % 2 != 0)
    throw UsageError("context_parallel_attention: {} positions on each of {} ranks cannot be two "
                     "chunks of a zigzag split: the sequence must be a multiple of {} long. Pad "
                     "it to {}, or split it contiguously",
                     q.size(2), group.size(), length_multiple(group.size(), options.split),
                     (q.size(2) + 1) * group.size());
}

}  // namespace

const char* name(ContextAlgorithm algorithm) {
  return algorithm == ContextAlgorithm::ring ? "ring" : "all_to_all";
}

at::Tensor context_parallel_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const std::shared_ptr<comm::Communicator>& group,
                                      const ContextParallelOptions& options) {
  if (group == nullptr)
    throw UsageError("context_parallel_attention: there is no group; pass "
                     "init_context_parallel_group(world, cp_size) or mesh.axis(\"cp\")");
  if (group->size() == 1)
    return attention(q, k, v, {.causal = options.causal, .scale = options.scale});
  check_parts(q, k, v, *group, options);
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3))));
  const Agreement agreed{fmt::format("q [{}], k and v [{}] of {}, {}, scale {}, {}, {}",
                                     fmt::join(q.sizes(), ", "), fmt::join(k.sizes(), ", "),
                                     c10::toString(q.scalar_type()),
                                     options.causal ? "causal" : "not causal", scale,
                                     name(options.algorithm), name(options.split))};
  if (options.algorithm == ContextAlgorithm::ring)
    return RingAttention::apply(q, k, v, group, options.causal, scale, options.split, agreed.text);
  return agreed.run([&] {
    return internal::all_to_all_attention(q, k, v, group, options.split,
                                          {.causal = options.causal, .scale = scale},
                                          agreed.subject());
  });
}

std::shared_ptr<comm::Communicator> init_context_parallel_group(
    const std::shared_ptr<comm::Communicator>& world, int cp_size) {
  if (cp_size < 1 || world->size() % cp_size != 0)
    throw UsageError("{} ranks cannot be split into context-parallel groups of {}: the size of a "
                     "group must divide the number of ranks",
                     world->size(), cp_size);
  return world->split(world->rank() / cp_size, world->rank(), "cp");
}

}  // namespace lockstep::nn
