#include <lockstep/nn/context_parallel/context_parallel.h>

#include <cmath>
#include <memory>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>
#include <lockstep/comm/communicator.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/context_parallel/ring_attention.h>
#include <lockstep/nn/context_parallel/sequence_split.h>
#include <lockstep/nn/layers/attention.h>
#include <lockstep/nn/tensor_parallel/communicator_capsule.h>

namespace lockstep::nn::internal {

namespace {

// Sends row r of x [ranks, …] to rank r; row r of the result comes from rank r. Backward sends each
// gradient back the same way.
class AllToAll : public torch::autograd::Function<AllToAll> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::shared_ptr<comm::Communicator>& group,
                            std::int64_t subject) {
    context->saved_data["group"] = kept(group);
    context->saved_data["subject"] = subject;
    return exchanged(x, *group, subject);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    intercept::refuse_double_backward("context_parallel_attention");
    const auto group = kept_group(context->saved_data["group"]);
    return {exchanged(gradients.at(0), *group, context->saved_data["subject"].toInt()), {}, {}};
  }

 private:
  static at::Tensor exchanged(const at::Tensor& x, comm::Communicator& group,
                              std::int64_t subject) {
    const auto input = x.contiguous();
    auto output = at::empty_like(input);
    group.all_to_all(output, input, {.subject = static_cast<std::int32_t>(subject)}).wait();
    return output;
  }
};

// Returns the heads of the keys that each rank gets, one rank after the other. On each rank its
// heads of the queries must divide evenly among its heads of the keys, as they do here. If possible
// these are just the heads that the rank's queries use; otherwise each of its heads of the queries
// gets a copy of its own.
std::vector<std::int64_t> kv_heads_by_rank(std::int64_t heads, std::int64_t kv_heads,
                                           std::int64_t ranks) {
  const auto per_kv = heads / kv_heads;
  const auto per_rank = heads / ranks;
  const auto step = per_rank % per_kv == 0 ? per_kv : per_kv % per_rank == 0 ? per_rank : 1;
  std::vector<std::int64_t> chosen;
  for (std::int64_t head = 0; head < heads; head += step) chosen.push_back(head / per_kv);
  return chosen;
}

// Views [batch, ranks · n, length, head_dim] as [ranks, batch, n, length, head_dim].
at::Tensor heads_by_rank(const at::Tensor& x, std::int64_t ranks) {
  return x.unflatten(1, {ranks, x.size(1) / ranks}).transpose(0, 1);
}

// Sends each rank its heads, in one message, and returns this rank's heads of q, k and v as [ranks,
// batch, n, local length, head_dim]. The tensors that were sent are freed when this returns.
at::Tensor sent_by_rank(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::shared_ptr<comm::Communicator>& group, std::int32_t subject) {
  const std::int64_t ranks = group->size();
  return AllToAll::apply(
      at::cat({heads_by_rank(q, ranks), heads_by_rank(k, ranks), heads_by_rank(v, ranks)}, 2),
      group, subject);
}

}  // namespace

// Computes attention by two all-to-alls (Ulysses, Jacobs et al., 2023). The shapes are those of
// context_parallel.h and have been checked there, except that the heads must be a multiple of the
// ranks: UsageError if they are not. Differentiable; `subject` is that of the group's calls.
at::Tensor all_to_all_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const std::shared_ptr<comm::Communicator>& group, SplitKind split,
                                const AttentionOptions& options, std::int32_t subject) {
  const std::int64_t ranks = group->size(), heads = q.size(1);
  if (heads % ranks != 0)
    throw UsageError("context_parallel_attention: all_to_all gives each of {} ranks as many heads, "
                     "and {} do not divide by that. Use the ring, or a group whose size divides "
                     "the heads",
                     ranks, heads);
  const auto chosen = kv_heads_by_rank(heads, k.size(1), ranks);
  const bool as_they_are = static_cast<std::int64_t>(chosen.size()) == k.size(1);
  at::Tensor keys = k, values = v;
  if (!as_they_are) {
    const auto index = device::on_device(chosen, at::kLong, k.device());
    keys = k.index_select(1, index);
    values = v.index_select(1, index);
  }

  const auto mine = heads / ranks, mine_of_kv = keys.size(1) / ranks;
  // [batch, n, length, head_dim], with the positions in the order of the sequence.
  const auto whole = join_parts(sent_by_rank(q, keys, values, group, subject).unbind(0), 2, split)
                         .split_with_sizes({mine, mine_of_kv, mine_of_kv}, 1);
  const auto output = attention(whole[0], whole[1], whole[2], options);

  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group->size(); ++rank)
    parts.push_back(take_part(output, 2, {.rank = rank, .size = group->size(), .kind = split}));
  const auto back = AllToAll::apply(at::stack(parts), group, subject);
  // [ranks, batch, n, local length, head_dim] to [batch, local length, heads, head_dim].
  return back.permute({1, 3, 0, 2, 4}).contiguous().flatten(2, 3).transpose(1, 2);
}

}  // namespace lockstep::nn::internal

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The arguments on which the ranks must agree, and the subject by which their calls are compared.
struct Agreement {
  std::string text;

  std::int32_t subject() const { return static_cast<std::int32_t>(hash_text(text) & 0x7fffffff); }

  // Runs a body that calls the group; the error of a mismatch also names the arguments of this
  // rank.
  template <typename Body>
  auto run(const Body& body) const {
    try {
      return body();
    } catch (const CommError& error) {
      if (error.fault() != Fault::mismatch) throw;
      auto details = error.details();
      // The subjects are hashes.
      details.explanation = comm::name_subjects(std::move(details.explanation),
                                                [](std::int32_t) { return std::string(); });
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
    // No copy if the sums have the queries' type; a copy keeps the memory layout.
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
    intercept::refuse_double_backward("context_parallel_attention");
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
