#include <lockstep/nn/all_to_all_attention.h>

#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/communicator_capsule.h>
#include <lockstep/nn/once_differentiable.h>

namespace lockstep::nn::internal {

namespace {

// x [ranks, …]: row r goes to rank r, and row r of the result comes from it. Backward sends each
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
    refuse_double_backward("context_parallel_attention");
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

// Which heads of the keys go to which rank, one rank after the other, so that on each its heads of
// the queries divide among them as they do here: all that its queries use where that is so, else
// one for each of its heads.
std::vector<std::int64_t> kv_heads_by_rank(std::int64_t heads, std::int64_t kv_heads,
                                           std::int64_t ranks) {
  const auto per_kv = heads / kv_heads;
  const auto per_rank = heads / ranks;
  const auto step = per_rank % per_kv == 0 ? per_kv : per_kv % per_rank == 0 ? per_rank : 1;
  std::vector<std::int64_t> chosen;
  for (std::int64_t head = 0; head < heads; head += step) chosen.push_back(head / per_kv);
  return chosen;
}

// [batch, ranks · n, length, head_dim] as [ranks, batch, n, length, head_dim].
at::Tensor heads_by_rank(const at::Tensor& x, std::int64_t ranks) {
  return x.unflatten(1, {ranks, x.size(1) / ranks}).transpose(0, 1);
}

// Each rank's heads to it, in one message; gives [ranks, batch, n, local length, head_dim], this
// rank's heads of q, k and v. What was sent is gone when this returns.
at::Tensor sent_by_rank(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const std::shared_ptr<comm::Communicator>& group, std::int32_t subject) {
  const std::int64_t ranks = group->size();
  return AllToAll::apply(
      at::cat({heads_by_rank(q, ranks), heads_by_rank(k, ranks), heads_by_rank(v, ranks)}, 2),
      group, subject);
}

}  // namespace

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
  const auto index = at::tensor(chosen, at::kLong).to(k.device());
  const auto keys = as_they_are ? k : k.index_select(1, index);
  const auto values = as_they_are ? v : v.index_select(1, index);

  const auto mine = heads / ranks, mine_of_kv = keys.size(1) / ranks;
  // [batch, n, length, head_dim], positions in their own order.
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
