// What a trainer trains: a model, and what its loss is.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/checkpoint/tensors.h>
#include <lockstep/data/dataset.h>
#include <lockstep/nn/cross_entropy.h>
#include <lockstep/train/counted.h>

namespace lockstep::train {

// Sums over the things (samples, tokens) of a batch, to be divided by how many there are.
struct Evaluation {
  nn::LossSum loss;
  std::vector<double> metric_sums;  // as Task::metric_names() has them
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

  // Of a model whose stages are on several ranks, for all of a step's batches at once. None of them
  // is empty, and all have as many samples. Runs forward and backward, which add to the gradients,
  // and returns their summed loss, on every rank of the pipeline.
  virtual bool is_pipelined() const { return false; }
  virtual double run_pipeline(std::int64_t step, const std::vector<data::Batch>& batches) {
    (void)step;
    (void)batches;
    return 0;
  }
  // What LossSum::count of a batch would be.
  virtual std::int64_t count(const data::Batch& batch) const { return batch.size(); }

  // How weights lie in a checkpoint's model.safetensors, and what lies beside it (config.json).
  virtual checkpoint::StoredForms stored_forms() const { return {}; }
  virtual std::map<std::string, std::string> checkpoint_files() const { return {}; }

  // What LossSum::count counts.
  virtual Counted counted() const { return Counted::samples; }
};

}  // namespace lockstep::train
