// A model in eval mode for a while.
#pragma once

#include <memory>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep::train {

// Puts a model into eval mode, and each of its parts back into the mode that it had.
class EvalMode {
 public:
  explicit EvalMode(const std::shared_ptr<torch::nn::Module>& model) : modules_(model->modules()) {
    for (const auto& module : modules_) was_training_.push_back(module->is_training());
    model->eval();
  }
  EvalMode(const EvalMode&) = delete;
  EvalMode& operator=(const EvalMode&) = delete;
  ~EvalMode() {
    for (std::size_t i = 0; i < modules_.size(); ++i) modules_[i]->train(was_training_[i]);
  }

 private:
  std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::vector<bool> was_training_;
};

}  // namespace lockstep::train
