// A model under test: a module as users write them, its data, and its loss.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep::parity {

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  // The loss summed over the samples of a batch, and over how many things it is a sum.
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& target)> loss_sum;
  std::int64_t per_sample = 1;
  // Samples of a step: the same for the same step, and each its own.
  std::function<std::pair<at::Tensor, at::Tensor>(std::int64_t num_samples)> make_batch;
};

// Whether a sample's loss depends on the other samples of its batch (batch norm does that).
enum class Samples { independent, mixed };

// Whether every parameter that is trained gets a gradient in every pass.
enum class Usage { full, partial };

struct SubjectKind {
  std::string name;
  // Made from LibTorch's global generator: seed it first.
  std::function<Subject()> make;
  Samples samples = Samples::independent;
  Usage usage = Usage::full;
  int num_batch_norms = 0;
  // Whether its blocks can be recomputed without a word in its forward.
  bool recomputable = false;
};

// All of them; nobody tuned Lockstep for them.
const std::vector<SubjectKind>& subject_kinds();

}  // namespace lockstep::parity
