#include <lockstep/optim/clip.h>

#include <cmath>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/optimizer.h>
#include <lockstep/optim/sum_of_squares.h>

namespace lockstep::optim {

namespace {

std::vector<at::Tensor> gradients_of(const std::vector<NamedParameter>& parameters,
                                     const NormScope& scope = {}) {
  check_distinct(parameters);
  std::vector<at::Tensor> gradients;
  for (const NamedParameter& parameter : parameters) {
    if (!scope.counts_parameter(parameter.name)) continue;
    at::Tensor gradient = gradient_of(parameter);
    if (gradient.defined()) gradients.push_back(std::move(gradient));
  }
  return gradients;
}

at::Tensor square_of(const std::vector<at::Tensor>& gradients) {
  std::vector<std::vector<mesh::Interval>> blocks;
  std::int64_t begin = 0;
  for (const at::Tensor& gradient : gradients) {
    const std::int64_t end = begin + num_norm_blocks(gradient);
    blocks.push_back({{begin, end}});
    begin = end;
  }
  return add_in_order(sums_of_squares(gradients), blocks);
}

}  // namespace

at::Tensor NormScope::norm(const at::Tensor& sum_of_squares) const {
  const at::Tensor square = sum ? sum(sum_of_squares) : sum_of_squares;
  // LibTorch may take roots of the process's memory by Intel's MKL, which does not round them as
  // everybody else does: the norm must not depend on where the gradients are.
  if (square.is_cpu()) return at::scalar_tensor(std::sqrt(square.item<double>()), at::kDouble);
  return square.sqrt();
}

at::Tensor gradient_norm(const std::vector<NamedParameter>& parameters, const NormScope& scope,
                         std::optional<c10::Device> device) {
  const c10::NoGradGuard no_grad;
  at::Tensor sum = square_of(gradients_of(parameters, scope));
  if (!device && !parameters.empty()) device = parameters.front().tensor.device();
  // Not every device has Doubles.
  if (device && device->is_cuda()) sum = sum.to(*device);
  return scope.norm(sum);
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  check_max_norm(max_norm);
  const c10::NoGradGuard no_grad;
  at::Tensor factor = at::ones_like(norm);
  if (max_norm > 0) {
    // By a tensor: some devices divide by a number as they multiply by its reciprocal.
    const at::Tensor c = (norm + 1e-6) / at::full_like(norm, max_norm);
    factor = at::where(c > 1, c.reciprocal(), factor);
  }
  return at::where(norm.isfinite(), factor, at::zeros_like(norm));
}

void check_max_norm(double max_norm) {
  if (std::isnan(max_norm) || max_norm < 0)
    throw UsageError("gradients cannot be clipped to a norm of {}: give a number above 0, or 0 for "
                     "no clipping",
                     max_norm);
}

ClipResult clip_to(double norm, const std::vector<at::Tensor>& gradients, double max_norm) {
  ClipResult result{.norm = norm, .finite = std::isfinite(norm)};
  if (!result.finite || max_norm == 0) return result;
  const double c = (norm + 1e-6) / max_norm;
  if (c <= 1) return result;
  multiply(gradients, 1 / c);
  result.clipped = true;
  return result;
}

ClipResult clip_gradients(const std::vector<NamedParameter>& parameters, double max_norm,
                          const NormScope& scope, std::optional<c10::Device> device) {
  check_max_norm(max_norm);
  return clip_to(gradient_norm(parameters, scope, device).item<double>(), gradients_of(parameters),
                 max_norm);
}

}  // namespace lockstep::optim
