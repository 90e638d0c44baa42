// A model under test: a module as users write it, its data, and its loss.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep::parity {

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  // The loss summed over the samples of a batch; `per_sample` is the number of terms for each
  // sample.
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)> loss_sum;
  std::int64_t per_sample = 1;
  // Makes the samples of a step: the same samples for the same step, each sample different.
  std::function<std::pair<at::Tensor, at::Tensor>(std::int64_t num_samples)> make_batch;
};

// Whether a sample's loss depends on the other samples of its batch (batch norm does that).
enum class Samples { independent, mixed };

// Whether every parameter that is trained gets a gradient in every pass.
enum class Usage { full, partial };

struct SubjectKind {
  std::string name;
  // Makes it from LibTorch's global generator, which has to be seeded first.
  std::function<Subject()> make;
  Samples samples = Samples::independent;
  Usage usage = Usage::full;
  int num_batch_norms = 0;
  // Whether its blocks can be recomputed without a change of its forward.
  bool recomputable = false;
};

// All subjects. Lockstep was tuned for none of them.
const std::vector<SubjectKind>& subject_kinds();

}  // namespace lockstep::parity
