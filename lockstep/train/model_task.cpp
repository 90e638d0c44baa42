#include <lockstep/train/model_task.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/observe/csv_file.h>

namespace lockstep::train {

namespace {

std::string shape_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return fmt::format("a tensor of shape [{}]", fmt::join(tensor.sizes(), ", "));
}

}  // namespace

nn::LossSum loss_sum(const at::Tensor& loss, std::int64_t num_samples, LossReduction reduction) {
  if (!loss.defined() || loss.numel() != 1)
    throw UsageError("the loss of a batch of {} samples is {}: it must be one number, their mean() "
                     "or, with LossReduction::sum, their sum()",
                     num_samples, shape_text(loss));
  if (at::GradMode::is_enabled() && !loss.requires_grad())
    throw UsageError("the loss does not depend on any parameter that is trained: compute it from "
                     "the model's output, without detach() or NoGradGuard");
  const at::Tensor scalar = loss.reshape({});
  return {.sum = reduction == LossReduction::mean ? scalar * num_samples : scalar,
          .count = num_samples};
}

double metric_number(const at::Tensor& value, const std::string& name) {
  if (!value.defined() || value.numel() != 1)
    throw UsageError("the metric '{}' of a batch is {}: it must be one number, the sum over the "
                     "batch's samples",
                     name, shape_text(value));
  return value.item<double>();
}

void check_metric_name(const std::string& name, const std::vector<std::string>& taken) {
  static const std::vector<std::string> ours = {
      "step",         "loss",          "validation_loss",    "learning_rate",
      "seconds",      "gradient_norm", "samples_per_second", "loss_scale",
      "skipped_steps"};
  if (!observe::is_metric_name(name))
    throw UsageError("a metric cannot be called '{}': a name has letters, digits and _ - . / only, "
                     "at most 200 of them",
                     name);
  if (std::ranges::count(ours, name) > 0)
    throw UsageError("a metric cannot be called '{}', which every run reports by itself: choose "
                     "another name",
                     name);
  if (std::ranges::count(taken, name) > 0)
    throw UsageError("there are two metrics called '{}': give each a name of its own", name);
}

at::Tensor widened(const at::Tensor& output, const at::Tensor& target) {
  const auto is_narrow = [](const at::Tensor& tensor) {
    return tensor.defined() &&
           (tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16);
  };
  return is_narrow(output) && !is_narrow(target) ? output.to(at::kFloat) : output;
}

}  // namespace lockstep::train
