#include <lockstep/nn/layers/cross_entropy.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>
#include <lockstep/device/parallel_pieces.h>
#include <lockstep/intercept/once_differentiable.h>
#include <lockstep/nn/kernels/cpu/softmax_kernels.h>

namespace lockstep::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The number of rows that a thread takes at a time, some 65536 logits.
std::int64_t grain(std::int64_t vocabulary) {
  return std::max<std::int64_t>(1, 65536 / std::max<std::int64_t>(1, vocabulary));
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits,
                            const at::Tensor& targets, std::int64_t ignore_index) {
    const auto rows = logits.size(0), vocabulary = logits.size(1);
    // Keeps each row's largest logit, and its sum of exponentials relative to that. One number for
    // both, the log-sum-exp, would lose precision if the logits are large.
    auto largest = at::empty({rows}, logits.options());
    auto sums = at::empty({rows}, logits.options());
    auto losses = at::empty({rows}, logits.options());
    const float* from = logits.data_ptr<float>();
    const auto* target = targets.data_ptr<std::int64_t>();
    auto* shift = largest.data_ptr<float>();
    auto* sum_of = sums.data_ptr<float>();
    auto* loss = losses.data_ptr<float>();
    device::parallel_pieces(rows, grain(vocabulary), [&](std::int64_t begin, std::int64_t end) {
      for (auto row = begin; row < end; ++row) {
        const float* values = from + row * vocabulary;
        loss[row] = 0.0f;
        if (target[row] == ignore_index) continue;
        shift[row] = internal::row_max(values, vocabulary, 1.0f);
        sum_of[row] = internal::row_exp_sum(values, vocabulary, shift[row]);
        loss[row] = (shift[row] - values[target[row]]) + std::log(sum_of[row]);
      }
    });
    context->save_for_backward({logits, targets, largest, sums});
    context->saved_data["ignore_index"] = ignore_index;
    double sum = 0.0;
    for (std::int64_t row = 0; row < rows; ++row) sum += loss[row];
    return at::scalar_tensor(sum, logits.options());
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    intercept::refuse_double_backward("cross_entropy");
    const auto saved = context->get_saved_variables();
    const auto ignore_index = context->saved_data["ignore_index"].toInt();
    const auto rows = saved[0].size(0), vocabulary = saved[0].size(1);
    const auto factor = grads[0].item<float>();
    auto gradient = at::empty_like(saved[0]);
    const float* from = saved[0].data_ptr<float>();
    const auto* target = saved[1].data_ptr<std::int64_t>();
    const float* shift = saved[2].data_ptr<float>();
    const float* sum_of = saved[3].data_ptr<float>();
    auto* to = gradient.data_ptr<float>();
    device::parallel_pieces(rows, grain(vocabulary), [&](std::int64_t begin, std::int64_t end) {
      for (auto row = begin; row < end; ++row) {
        float* values = to + row * vocabulary;
        if (target[row] == ignore_index) {
          std::fill_n(values, vocabulary, 0.0f);
          continue;
        }
        internal::row_exp(from + row * vocabulary, values, vocabulary, 1.0f, shift[row]);
        internal::row_scale(values, vocabulary, factor / sum_of[row]);
        values[target[row]] -= factor;
      }
    });
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

LossSum cross_entropy(const at::Tensor& logits, const Targets& given, std::int64_t ignore_index) {
  const at::Tensor& targets = given.tensor;
  if (logits.dim() != 2)
    throw UsageError("cross_entropy: logits have the shape [{}]: they must be [rows, vocabulary]",
                     fmt::join(logits.sizes(), ", "));
  const auto count = internal::count_targets(
      "cross_entropy", given,
      {.rows = logits.size(0), .vocabulary = logits.size(1), .ignore_index = ignore_index});
  const bool on_cpu = logits.device().is_cpu() && targets.device().is_cpu();
  if (on_cpu && logits.scalar_type() == at::kFloat)
    return {CrossEntropy::apply(logits.contiguous(), targets.contiguous(), ignore_index), count};
  // 16 bits cannot hold a sum of thousands of losses.
  const bool narrow = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  return {at::cross_entropy_loss(narrow ? logits.to(at::kFloat) : logits, targets, {},
                                 at::Reduction::Sum, ignore_index),
          count};
}

}  // namespace lockstep::nn

namespace lockstep::nn::internal {

std::int64_t count_targets(const char* function, const Targets& given, const TargetShape& shape) {
  const at::Tensor& targets = given.tensor;
  if (targets.scalar_type() != at::kLong || targets.dim() != 1 || targets.size(0) != shape.rows)
    throw UsageError("{}: targets are {} of the shape [{}]: they must be Long (int64) of the shape "
                     "[{}], one for "
                     "each row",
                     function, c10::toString(targets.scalar_type()),
                     fmt::join(targets.sizes(), ", "), shape.rows);
  // Copying eight bytes a row to the host costs nothing beside a row of logits.
  const at::Tensor here = (given.on_host.defined() ? given.on_host : targets.cpu()).contiguous();
  if (!here.is_cpu() || here.sizes() != targets.sizes() || here.scalar_type() != at::kLong)
    throw UsageError("{}: targets are [{}], and what is said to be the same on the host is {} of "
                     "the shape [{}] on {}",
                     function, fmt::join(targets.sizes(), ", "), c10::toString(here.scalar_type()),
                     fmt::join(here.sizes(), ", "), here.device().str());
  const auto* values = here.data_ptr<std::int64_t>();
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < shape.rows; ++row) {
    if (values[row] == shape.ignore_index) continue;
    if (values[row] < 0 || values[row] >= shape.vocabulary)
      throw UsageError("{}: the target of row {} is {}, outside the vocabulary of {}: targets are "
                       "0 to {}, or {} "
                       "for rows to leave out",
                       function, row, values[row], shape.vocabulary, shape.vocabulary - 1,
                       shape.ignore_index);
    ++count;
  }
  return count;
}

}  // namespace lockstep::nn::internal
