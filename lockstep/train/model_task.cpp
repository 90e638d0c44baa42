#include <lockstep/train/model_task.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/observe/csv_file.h>
#include <lockstep/train/module_pipeline.h>

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

StagedPasses::StagedPasses(std::shared_ptr<ModulePipeline> stages, LossOf loss, bool counts_itself)
    : stages_(std::move(stages)), loss_(std::move(loss)), counts_itself_(counts_itself) {}

namespace {

// A loss of pipelines: of a micro-batch.
OutputLoss loss_of_outputs(const StagedPasses::LossOf& loss, bool counts_itself) {
  return {.of =
              [&loss](const at::Tensor& output, const MicroBatch& given) {
                return loss(output, {.input = given.input, .target = given.target});
              },
          .counts_itself = counts_itself};
}

}  // namespace

PassesLoss StagedPasses::run(std::int64_t /*step*/, const std::vector<data::Batch>& batches,
                             const GradientScale& scale) {
  std::vector<MicroBatch> given;
  for (const data::Batch& batch : batches)
    given.push_back({.input = batch.input,
                     .target = batch.target,
                     .samples = static_cast<std::int64_t>(batch.rows.size())});
  return stages_->run(given, loss_of_outputs(loss_, counts_itself_), scale);
}

// Of tokens, one for each number of the target.
std::int64_t StagedPasses::expected_count(const data::Batch& batch) const {
  const auto samples = static_cast<std::int64_t>(batch.rows.size());
  return counts_itself_ && samples > 0 && batch.target.defined() ? batch.target.numel() : samples;
}

void StagedPasses::check_passes(std::int64_t num_passes) const { stages_->check_size(num_passes); }

nn::LossSum StagedPasses::evaluate(const data::Batch& batch, at::Tensor* output) {
  const PassesLoss made =
      stages_->evaluate({{.input = batch.input, .target = batch.target, .samples = batch.size()}},
                        loss_of_outputs(loss_, counts_itself_), output);
  if (output != nullptr) *output = stages_->from_last_stage(std::move(*output));
  return {.sum = at::scalar_tensor(made.sum, at::kDouble), .count = made.count};
}

at::Tensor StagedPasses::output(const data::Batch& batch) {
  const OutputLoss none{.of = [](const at::Tensor& output, const MicroBatch&) -> nn::LossSum {
    return {.sum = at::zeros({}, output.options().dtype(at::kFloat)), .count = 0};
  }};
  at::Tensor output;
  stages_->evaluate({{.input = batch.input, .target = batch.target, .samples = batch.size()}}, none,
                    &output);
  return stages_->from_last_stage(std::move(output));
}

void refuse_stages() {
  throw UsageError("the model is cut into the stages of a pipeline, and its forward() does not "
                   "return a tensor, which the loss of a pipeline takes");
}

}  // namespace lockstep::train
