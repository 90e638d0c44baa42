// The task of a trainer: a model and its loss.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/data/dataset.h>
#include <lockstep/nn/layers/cross_entropy.h>

namespace lockstep::train {

// The unit in which a run's progress is counted.
enum class Counted { samples, tokens };

// Sums over the things (samples, tokens) of a batch, to be divided by how many there are.
struct Evaluation {
  nn::LossSum loss;
  std::vector<double> metric_sums;  // as Task::metric_names() has them
};

// The passes of a model whose stages are on several ranks. As Task in all else.
class PipelinePasses {
 public:
  virtual ~PipelinePasses() = default;

  // What backward is called on in place of a batch's summed loss, whose value it has.
  using GradientScale = std::function<at::Tensor(const at::Tensor& loss_sum)>;

  // Forward and backward of all of a step's batches at once, which add to the gradients. The last
  // step of an epoch may have fewer of them, and fewer samples, or none, in each. Returns their
  // summed loss, on every rank. `scale` is empty where gradients have none.
  virtual double run(std::int64_t step, const std::vector<data::Batch>& batches,
                     const GradientScale& scale) = 0;

  // What LossSum::count of a batch would be.
  virtual std::int64_t count(const data::Batch& batch) const = 0;
};

// Ownership: shares the model. Threading: one thread. Failure: whatever the model throws.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::shared_ptr<torch::nn::Module> model() const = 0;

  // The loss of a batch, which is not empty, with a graph for backward.
  virtual nn::LossSum loss(const data::Batch& batch) = 0;

  // The same for validation, without one.
  virtual Evaluation evaluate(const data::Batch& batch) = 0;
  virtual std::vector<std::string> metric_names() const { return {}; }

  // Before the loss of each batch in training: for models whose random numbers are a function of
  // the step and of each sample's place in the batch of all ranks.
  virtual void begin(std::int64_t step, const std::vector<std::int64_t>& rows) {
    (void)step;
    (void)rows;
  }

  // In place of loss() where the model's stages are on several ranks; null where they are not.
  virtual PipelinePasses* pipeline() { return nullptr; }

  // What lies in a checkpoint beside the tensors: config.json.
  virtual std::map<std::string, std::string> checkpoint_files() const { return {}; }

  // What LossSum::count counts.
  virtual Counted counted() const { return Counted::samples; }
};

}  // namespace lockstep::train
