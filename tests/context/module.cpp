#include <lockstep/nn/context_parallel/context_parallel_attention.h>
#include <lockstep/recompute/recompute.h>

#include "against_whole.h"

namespace lockstep::nn {

namespace {

using ranks::Cells;

constexpr std::int64_t kWidth = 24;

struct Pass {
  at::Tensor output;
  at::Tensor input_grad;
  std::vector<at::Tensor> weight_grads;
};

enum class Kept { all, nothing };  // how much is kept for backward

Pass pass_through(ContextParallelAttention& module, const at::Tensor& x, const at::Tensor& grad,
                  Kept kept = Kept::all) {
  module->zero_grad();
  const auto leaf = x.detach().clone().requires_grad_();
  const auto forward = [&](const at::Tensor& in) { return module->forward(in); };
  const auto output = kept == Kept::all ? forward(leaf) : recompute(forward, leaf);
  output.backward(grad);
  Pass pass{output.detach(), leaf.grad(), {}};
  for (const auto& parameter : module->parameters())
    pass.weight_grads.push_back(parameter.grad().clone());
  return pass;
}

ContextParallelAttention seeded_module(const std::shared_ptr<comm::Communicator>& group,
                                       const ContextParallelAttentionOptions& options) {
  torch::manual_seed(3);
  ContextParallelAttention module(kWidth, 12, group, options);
  module->to(at::kDouble);
  return module;
}

void check_one(Cells& cells, const std::shared_ptr<comm::Communicator>& alone,
               const ContextParallelAttentionOptions& options) {
  auto whole = seeded_module(alone, options);
  auto split = seeded_module(cells.group(), options);
  torch::manual_seed(5);
  const auto x = at::randn({2, 48, kWidth}, at::kDouble);
  const auto grad = at::randn({2, 48, kWidth}, at::kDouble);
  const auto part = part_of_rank(cells, options.split);
  const auto wanted = pass_through(whole, x, grad);
  const auto found = pass_through(split, take_part(x, 1, part), take_part(grad, 1, part));
  expect_within(cells, found.output, take_part(wanted.output, 1, part), 1e-10, "the result");
  expect_within(cells, found.input_grad, take_part(wanted.input_grad, 1, part), 1e-10,
                "the input's gradient");
  cells.expect(found.weight_grads.size() == wanted.weight_grads.size(), "other weights");
  for (std::size_t i = 0; i < wanted.weight_grads.size(); ++i) {
    auto sum = found.weight_grads[i].clone();
    cells.group()->all_reduce(sum).wait();
    expect_within(cells, sum, wanted.weight_grads[i], 1e-10,
                  fmt::format("the sum of gradients {}", i));
  }
  const auto again =
      pass_through(split, take_part(x, 1, part), take_part(grad, 1, part), Kept::nothing);
  cells.expect_same(again.output, found.output, "recomputed, the result");
  for (std::size_t i = 0; i < found.weight_grads.size(); ++i)
    cells.expect_same(again.weight_grads[i], found.weight_grads[i],
                      fmt::format("recomputed, gradient {}", i));
}

}  // namespace

void check_module(Cells& cells) {
  const auto alone = cells.group()->split(cells.rank(), 0, "alone");
  for (const auto algorithm : {ContextAlgorithm::ring, ContextAlgorithm::all_to_all})
    for (const auto split : {SplitKind::contiguous, SplitKind::zigzag}) {
      const auto title = fmt::format("module, {} {}", name(algorithm), name(split));
      cells.cell(title, [&] {
        check_one(cells, alone, {.causal = false, .algorithm = algorithm, .split = split});
      });
      cells.cell(title + ", rotary, shared keys, biases", [&] {
        check_one(cells, alone,
                  {.num_kv_heads = 4,
                   .algorithm = algorithm,
                   .split = split,
                   .rotary_theta = 100.0,
                   .bias = Bias::added});
      });
    }
  cells.cell("weights are drawn as torch::nn::Linear's", [&] {
    torch::manual_seed(9);
    ContextParallelAttention module(kWidth, 4, cells.group());
    torch::manual_seed(9);
    torch::nn::Linear first(torch::nn::LinearOptions(kWidth, kWidth).bias(false));
    cells.expect_same(module->q_proj->weight, first->weight, "the first projection's weight");
    const auto names = module->named_parameters().keys();
    cells.expect(names == std::vector<std::string>{"q_proj.weight", "k_proj.weight",
                                                   "v_proj.weight", "o_proj.weight"},
                 "other names");
  });
  cells.cell("groups of neighbours", [&] {
    if (cells.num_ranks() != 4) return;
    const auto group = init_context_parallel_group(cells.group(), 2);
    const int first = cells.rank() / 2 * 2;
    cells.expect(group->global_ranks() == std::vector<int>{first, first + 1},
                 "the group has other ranks");
    cells.expect(group->rank() == cells.rank() % 2, "another place in the group");
  });
}

}  // namespace lockstep::nn
