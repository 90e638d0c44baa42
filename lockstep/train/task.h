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

// Sums over the samples or tokens of a batch, to be divided by their number.
struct Evaluation {
  nn::LossSum loss;
  std::vector<double> metric_sums;  // in the order of Task::metric_names()
};

// Makes the tensor on which backward is called from a batch's summed loss; the tensor has the value
// of that loss. Empty if gradients have no loss scale.
using GradientScale = std::function<at::Tensor(const at::Tensor& loss_sum)>;

// The loss of passes that are run at once: sums over the batches of this rank's share of the data,
// the same on every rank of a pipeline.
struct PassesLoss {
  double sum = 0;
  std::int64_t count = 0;
};

// The passes of a model whose stages are on several ranks. Ownership, threading and failure are
// those of Task.
class PipelinePasses {
 public:
  virtual ~PipelinePasses() = default;

  // Runs forward and backward of all of a step's batches at once and adds to the gradients. The
  // last step of an epoch may have fewer batches, with fewer samples in each.
  virtual PassesLoss run(std::int64_t step, const std::vector<data::Batch>& batches,
                         const GradientScale& scale) = 0;

  // About what LossSum::count of a batch is.
  virtual std::int64_t expected_count(const data::Batch& batch) const = 0;

  // UsageError where the schedule cannot run so many batches a step.
  virtual void check_passes(std::int64_t num_passes) const = 0;

  // Whether run() takes batches without samples. If not, they are given samples that do not count,
  // and have no rows.
  virtual bool takes_empty_batches() const = 0;
};

// Ownership: shares the model. Threading: one thread. Failure: whatever the model throws.
class Task {
 public:
  virtual ~Task() = default;

  virtual std::shared_ptr<torch::nn::Module> model() const = 0;

  // The loss of a batch that is not empty, with a graph for backward.
  virtual nn::LossSum loss(const data::Batch& batch) = 0;

  // The loss and metrics of a validation batch, without a graph.
  virtual Evaluation evaluate(const data::Batch& batch) = 0;
  virtual std::vector<std::string> metric_names() const { return {}; }

  // Called before the loss of each training batch: for models whose random numbers are a function
  // of the step and of each sample's place in the batch of all ranks.
  virtual void begin(std::int64_t step, const std::vector<std::int64_t>& rows) {
    (void)step;
    (void)rows;
  }

  // Replaces loss() if the model's stages are on several ranks; null if they are not.
  virtual PipelinePasses* pipeline() { return nullptr; }

  // Files that a checkpoint has beside the tensors, such as config.json.
  virtual std::map<std::string, std::string> checkpoint_files() const { return {}; }

  // The unit of LossSum::count.
  virtual Counted counted() const { return Counted::samples; }
};

}  // namespace lockstep::train
