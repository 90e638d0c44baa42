#include <algorithm>
#include <cmath>

#include <spdlog/fmt/ranges.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/nn/cross_entropy.h>
#include <lockstep/nn/once_differentiable.h>
#include <lockstep/nn/softmax_kernels.h>
#include <lockstep/nn/targets.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Logits that are there at once, at least a row of them. On a CPU about what its caches hold, with
// rows enough to read the weight seldom; a GPU needs more at a time to be busy.
constexpr std::int64_t kBlockBytesCpu = 16 << 20;
constexpr std::int64_t kBlockBytesGpu = 256 << 20;

struct Wanted {
  bool hidden = false;
  bool weight = false;

  bool any() const { return hidden || weight; }
};

// Losses of a block of rows; where gradients are wanted, turns its logits into their gradient.
at::Tensor block_losses(at::Tensor& logits, const at::Tensor& targets, std::int64_t ignore_index,
                        Wanted wanted) {
  if (logits.device().is_cpu() && logits.scalar_type() == at::kFloat) {
    const auto vocabulary = logits.size(1);
    auto losses = at::zeros({logits.size(0)}, logits.options());
    auto* values = logits.data_ptr<float>();
    const auto* target = targets.data_ptr<std::int64_t>();
    auto* loss = losses.data_ptr<float>();
    const auto grain = std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, vocabulary));
    device::parallel_pieces(logits.size(0), grain, [&](std::int64_t begin, std::int64_t end) {
      for (auto row = begin; row < end; ++row) {
        float* one = values + row * vocabulary;
        if (target[row] == ignore_index) {
          std::fill_n(one, vocabulary, 0.0f);
          continue;
        }
        const float right = one[target[row]];
        const float largest = internal::row_max(one, vocabulary, 1.0f);
        const float sum = internal::row_exp(one, one, vocabulary, 1.0f, largest);
        loss[row] = (largest - right) + std::log(sum);
        if (!wanted.any()) continue;
        internal::row_scale(one, vocabulary, 1.0f / sum);
        one[target[row]] -= 1.0f;
      }
    });
    return losses;
  }
  const auto valid = targets.ne(ignore_index);
  const auto indices = targets.masked_fill(valid.logical_not(), 0).unsqueeze(1);
  auto log_probabilities = logits.log_softmax(1);
  auto losses =
      log_probabilities.gather(1, indices).squeeze(1).neg().masked_fill(valid.logical_not(), 0);
  if (wanted.any()) {
    logits = log_probabilities.exp_();
    logits.scatter_add_(1, indices, at::full_like(indices, -1, logits.options()));
    logits.masked_fill_(valid.logical_not().unsqueeze(1), 0);
  }
  return losses;
}

// The gradients are computed in forward, from the block of logits at hand, and only scaled in
// backward: computing the logits again would make four products of this size out of three (with a
// vocabulary of 50257 they are nearly all of the time), and save no memory, as backward needs room
// for the gradients anyway.
class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& hidden,
                            const at::Tensor& weight, const at::Tensor& targets,
                            std::int64_t ignore_index, bool hidden_wanted, bool weight_wanted) {
    const Wanted wanted{hidden_wanted, weight_wanted};
    const auto rows = hidden.size(0), vocabulary = weight.size(0);
    const auto type = hidden.scalar_type();
    const auto exact = type == at::kDouble ? at::kDouble : at::kFloat;
    const auto wide = hidden.options().dtype(exact);
    const auto block_bytes = hidden.device().is_cpu() ? kBlockBytesCpu : kBlockBytesGpu;
    const auto block = std::max<std::int64_t>(
        1, block_bytes / std::max<std::int64_t>(
                             1, vocabulary * static_cast<std::int64_t>(c10::elementSize(exact))));
    at::Tensor hidden_grad, weight_grad;
    if (wanted.hidden) hidden_grad = at::empty_like(hidden, at::MemoryFormat::Contiguous);
    if (wanted.weight) weight_grad = at::zeros(weight.sizes(), wide);
    auto losses = at::empty({rows}, wide);
    // One block's memory for all of them.
    const auto memory = at::empty({std::min(block, rows), vocabulary}, hidden.options());
    for (std::int64_t first = 0; first < rows; first += block) {
      const auto count = std::min(block, rows - first);
      const auto inputs = hidden.narrow(0, first, count);
      auto product = memory.narrow(0, 0, count);
      at::mm_out(product, inputs, weight.t());
      auto logits = product.to(exact);
      losses.narrow(0, first, count)
          .copy_(block_losses(logits, targets.narrow(0, first, count), ignore_index, wanted));
      if (!wanted.any()) continue;
      const auto slopes = logits.to(type);
      if (wanted.hidden) {
        auto to = hidden_grad.narrow(0, first, count);
        at::mm_out(to, slopes, weight);
      }
      if (wanted.weight) {
        if (type == exact)
          weight_grad.addmm_(slopes.t(), inputs);
        else
          weight_grad.add_(at::mm(slopes.t(), inputs));
      }
    }
    context->save_for_backward({hidden_grad, weight_grad});
    context->saved_data["weight_type"] = static_cast<std::int64_t>(weight.scalar_type());
    // In the order of rows, whatever the number of threads; a GPU's sum has an order of its own.
    if (!losses.device().is_cpu()) return losses.sum(at::kDouble).to(exact);
    double sum = 0.0;
    const auto each = losses.to(at::kDouble);
    for (std::int64_t row = 0; row < rows; ++row) sum += each.data_ptr<double>()[row];
    return at::scalar_tensor(sum, wide);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    internal::refuse_double_backward("linear_cross_entropy");
    const auto saved = context->get_saved_variables();
    const auto type = static_cast<at::ScalarType>(context->saved_data["weight_type"].toInt());
    variable_list results(6);
    for (std::size_t i = 0; i < 2; ++i)
      if (saved[i].defined()) results[i] = (saved[i] * grads[0]).to(type);
    return results;
  }
};

}  // namespace

LossSum linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                             const at::Tensor& targets, std::int64_t ignore_index) {
  if (hidden.dim() != 2 || weight.dim() != 2 || hidden.size(1) != weight.size(1))
    throw UsageError("linear_cross_entropy: hidden has the shape [{}] and weight [{}]: they must "
                     "be [rows, width] "
                     "and [vocabulary, width]",
                     fmt::join(hidden.sizes(), ", "), fmt::join(weight.sizes(), ", "));
  if (hidden.scalar_type() != weight.scalar_type() || hidden.device() != weight.device() ||
      hidden.device() != targets.device())
    throw UsageError("linear_cross_entropy: hidden is {} on {}, weight {} on {}, targets on {}: "
                     "the first two must "
                     "be of one type, and all on one device",
                     c10::toString(hidden.scalar_type()), hidden.device().str(),
                     c10::toString(weight.scalar_type()), weight.device().str(),
                     targets.device().str());
  const auto count = internal::count_targets(
      "linear_cross_entropy", targets,
      {.rows = hidden.size(0), .vocabulary = weight.size(0), .ignore_index = ignore_index});
  const bool recorded = at::GradMode::is_enabled();
  return {LinearCrossEntropy::apply(hidden, weight, targets.contiguous(), ignore_index,
                                    recorded && hidden.requires_grad(),
                                    recorded && weight.requires_grad()),
          count};
}

}  // namespace lockstep::nn
