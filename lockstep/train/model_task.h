// The training task of any model with any loss.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

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

// Model is a module holder or a shared_ptr. Its forward() takes a batch's input and returns
// anything; the loss and the metrics get that together with the batch's target.
template <typename Model>
class ModelTask : public Task {
 public:
  using Output =
      std::decay_t<decltype(std::declval<Model&>()->forward(std::declval<at::Tensor&>()))>;

  template <typename Loss>
  ModelTask(Model model, Loss loss, LossReduction reduction) : model_(std::move(model)) {
    using Given = std::invoke_result_t<Loss&, const Output&, const at::Tensor&>;
    loss_ = [loss = std::move(loss), reduction](const Output& output,
                                                const data::Batch& batch) mutable {
      if constexpr (std::is_convertible_v<Given, nn::LossSum>)
        return nn::LossSum(loss(output, batch.target));
      else
        return loss_sum(loss(output, batch.target), batch.size(), reduction);
    };
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
    const Output output = forward(batch);
    Evaluation evaluation{.loss = loss_(output, batch), .metric_sums = {}};
    for (auto& metric : metrics_) evaluation.metric_sums.push_back(metric(output, batch.target));
    return evaluation;
  }

  std::vector<std::string> metric_names() const override { return names_; }

  // What the model gives for a batch, in 32 bits where it is a tensor.
  Output output(const data::Batch& batch) { return forward(batch); }

 private:
  Output forward(const data::Batch& batch) {
    at::Tensor input = batch.input;
    Output output = model_->forward(input);
    if constexpr (std::is_same_v<Output, at::Tensor>) return widened(output, batch.target);
    return output;
  }

  Model model_;
  std::function<nn::LossSum(const Output&, const data::Batch&)> loss_;
  std::vector<std::string> names_;
  std::vector<std::function<double(const Output&, const at::Tensor&)>> metrics_;
};

}  // namespace lockstep::train
