#include <lockstep/optim/clip.h>

#include <cmath>
#include <numeric>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/base/error.h>
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

double square_of(const std::vector<at::Tensor>& gradients) {
  const std::vector<double> sums = sum_of_squares_of_blocks(gradients);
  auto next = sums.begin();
  double total = 0;
  for (const at::Tensor& gradient : gradients) {
    const auto end = next + num_norm_blocks(gradient);
    total += std::accumulate(next, end, 0.0);
    next = end;
  }
  return total;
}

}  // namespace

double NormScope::norm(double sum_of_squares) const {
  return std::sqrt(sum ? sum(sum_of_squares) : sum_of_squares);
}

double gradient_norm(const std::vector<NamedParameter>& parameters) {
  return std::sqrt(square_of(gradients_of(parameters)));
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
  const c10::NoGradGuard no_grad;
  // The operator refuses an empty list, and older versions of it trip over empty tensors.
  std::vector<at::Tensor> present;
  for (const at::Tensor& gradient : gradients)
    if (gradient.numel() > 0) present.push_back(gradient);
  if (!present.empty()) at::_foreach_mul_(present, 1 / c);
  result.clipped = true;
  return result;
}

ClipResult clip_gradients(const std::vector<NamedParameter>& parameters, double max_norm,
                          const NormScope& scope) {
  check_max_norm(max_norm);
  return clip_to(scope.norm(square_of(gradients_of(parameters, scope))), gradients_of(parameters),
                 max_norm);
}

}  // namespace lockstep::optim
