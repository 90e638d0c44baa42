// The training task of any model with any loss.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/data/dataset.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// How a loss combines the samples of its batch.
enum class LossReduction { mean, sum };

// A loss as sum and count. UsageError if it is no scalar that gradients can be computed of.
nn::LossSum loss_sum(const at::Tensor& loss, std::int64_t num_samples, LossReduction reduction);

// The metric's number. UsageError, naming the metric, if it gave more than one number.
double metric_number(const at::Tensor& value, const std::string& name);

// UsageError if a metric's name is empty or has another meaning in the run's files.
void check_metric_name(const std::string& name, const std::vector<std::string>& taken);

// Converts the output of a model that computes in 16 bits to the 32 bits of losses and targets.
at::Tensor widened(const at::Tensor& output, const at::Tensor& target);

class ModulePipeline;

// The passes of a task whose model has its stages on several ranks. Ownership: shares the pipeline.
// Threading and failure are those of PipelinePasses.
class StagedPasses : public PipelinePasses {
 public:
  // The loss of what the last stage made, and of a batch's targets.
  using LossOf = std::function<nn::LossSum(const at::Tensor& output, const data::Batch& batch)>;

  // `counts_itself`: the loss counts something else than samples.
  StagedPasses(std::shared_ptr<ModulePipeline> stages, LossOf loss, bool counts_itself);

  PassesLoss run(std::int64_t step, const std::vector<data::Batch>& batches,
                 const GradientScale& scale) override;
  std::int64_t expected_count(const data::Batch& batch) const override;
  void check_passes(std::int64_t num_passes) const override;
  bool takes_empty_batches() const override { return false; }

  // Forward alone; with `output`, every rank of the pipeline gets what the last stage made.
  nn::LossSum evaluate(const data::Batch& batch, at::Tensor* output);
  at::Tensor output(const data::Batch& batch);

 private:
  std::shared_ptr<ModulePipeline> stages_;
  LossOf loss_;
  bool counts_itself_;
};

// UsageError: the loss of a pipeline takes one tensor.
[[noreturn]] void refuse_stages();

// Model is a module holder or a shared_ptr. Its forward() takes a batch's input and returns
// anything; the loss and the metrics get that together with the batch's target.
template <typename Model>
class ModelTask : public Task {
 public:
  using Output =
      std::decay_t<decltype(std::declval<Model&>()->forward(std::declval<at::Tensor&>()))>;

  // `stages`: of the model, where its layers are on several ranks.
  template <typename Loss>
  ModelTask(Model model, Loss loss, LossReduction reduction,
            std::shared_ptr<ModulePipeline> stages = nullptr)
      : model_(std::move(model)) {
    using Given = std::invoke_result_t<Loss&, const Output&, const at::Tensor&>;
    loss_ = [loss = std::move(loss), reduction](const Output& output,
                                                const data::Batch& batch) mutable {
      if constexpr (std::is_convertible_v<Given, nn::LossSum>)
        return nn::LossSum(loss(output, batch.target));
      else
        return loss_sum(loss(output, batch.target), batch.size(), reduction);
    };
    if (stages == nullptr) return;
    if constexpr (std::is_same_v<Output, at::Tensor>)
      passes_ = std::make_unique<StagedPasses>(
          std::move(stages),
          [this](const at::Tensor& output, const data::Batch& batch) {
            return loss_(widened(output, batch.target), batch);
          },
          std::is_convertible_v<Given, nn::LossSum>);
    else
      refuse_stages();
  }

  template <typename Metric>
  void add_metric(std::string name, Metric metric) {
    using Given = std::invoke_result_t<Metric&, const Output&, const at::Tensor&>;
    check_metric_name(name, names_);
    metrics_.push_back(
        [name, metric = std::move(metric)](const Output& output, const at::Tensor& target) mutable {
          if constexpr (std::is_arithmetic_v<Given>)
            return static_cast<double>(metric(output, target));
          else
            return metric_number(metric(output, target), name);
        });
    names_.push_back(std::move(name));
  }

  const Model& typed_model() const { return model_; }

  std::shared_ptr<torch::nn::Module> model() const override { return internal::module_of(model_); }

  nn::LossSum loss(const data::Batch& batch) override { return loss_(forward(batch), batch); }

  Evaluation evaluate(const data::Batch& batch) override {
    if constexpr (std::is_same_v<Output, at::Tensor>) {
      if (passes_ != nullptr) {
        at::Tensor made;
        const nn::LossSum loss = passes_->evaluate(batch, metrics_.empty() ? nullptr : &made);
        return {.loss = loss, .metric_sums = metrics_of(widened(made, batch.target), batch)};
      }
    }
    const Output made = forward(batch);
    return {.loss = loss_(made, batch), .metric_sums = metrics_of(made, batch)};
  }

  std::vector<std::string> metric_names() const override { return names_; }

  PipelinePasses* pipeline() override { return passes_.get(); }

  // What the model gives for a batch, in 32 bits where it is a tensor.
  Output output(const data::Batch& batch) {
    if constexpr (std::is_same_v<Output, at::Tensor>)
      if (passes_ != nullptr) return widened(passes_->output(batch), batch.target);
    return forward(batch);
  }

 private:
  std::vector<double> metrics_of(const Output& output, const data::Batch& batch) {
    std::vector<double> sums;
    for (auto& metric : metrics_) sums.push_back(metric(output, batch.target));
    return sums;
  }

  Output forward(const data::Batch& batch) {
    at::Tensor input = batch.input;
    Output output = model_->forward(input);
    if constexpr (std::is_same_v<Output, at::Tensor>) return widened(output, batch.target);
    return output;
  }

  Model model_;
  std::unique_ptr<StagedPasses> passes_;  // null where this rank has all layers
  std::function<nn::LossSum(const Output&, const data::Batch&)> loss_;
  std::vector<std::string> names_;
  std::vector<std::function<double(const Output&, const at::Tensor&)>> metrics_;
};

}  // namespace lockstep::train
