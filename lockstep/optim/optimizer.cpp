#include <lockstep/optim/optimizer.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/adamw.h>
#include <lockstep/optim/sgd.h>

namespace lockstep::optim {

StepFactor::StepFactor(const at::Tensor& factor) : factor_(factor) {
  if (!factor.defined() || factor.numel() != 1 || factor.scalar_type() != at::kDouble)
    throw UsageError("a step cannot multiply gradients by {}: give one Double",
                     factor.defined()
                         ? fmt::format("{} of the shape [{}]", c10::toString(factor.scalar_type()),
                                       fmt::join(factor.sizes(), ", "))
                         : "an undefined tensor");
  on_host_ = device::HostCopy(factor);
}

double StepFactor::value() const { return is_one() ? 1 : *on_host_.get().data_ptr<double>(); }

void multiply(const std::vector<at::Tensor>& gradients, double factor) {
  if (factor == 1) return;
  const c10::NoGradGuard no_grad;
  // The operator refuses an empty list, and older versions of it trip over empty tensors.
  std::vector<at::Tensor> present;
  for (const at::Tensor& gradient : gradients)
    if (gradient.numel() > 0) present.push_back(gradient);
  if (!present.empty()) at::_foreach_mul_(present, factor);
}

namespace {

struct Maker {
  std::vector<ParameterGroup> groups;

  std::unique_ptr<Optimizer> operator()(const AdamWOptions& options) {
    return std::make_unique<AdamW>(std::move(groups), options);
  }
  std::unique_ptr<Optimizer> operator()(const SGDOptions& options) {
    return std::make_unique<SGD>(std::move(groups), options);
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups) {
  return std::visit(Maker{std::move(groups)}, options);
}

}  // namespace lockstep::optim
