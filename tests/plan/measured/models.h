// The models whose memory is measured, each with a loss over its own batch.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/models/spec/config.h>
#include <lockstep/models/spec/training_step.h>

namespace lockstep::plan::testing {

struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor()> loss;  // runs a micro-batch that it makes
};

struct NamedSubject {
  std::string name;
  std::function<Subject()> make;
};

// Layers of torch::nn as users write them.
NamedSubject mlp();
NamedSubject lstm();
// Has frozen and shared weights, buffers, and a batch that is larger than the parameters.
NamedSubject odd();

// One of our language models, and its step in numbers.
struct LanguageSubject {
  std::string name;
  models::ModelConfig config;
  models::LanguageModelStep step;

  NamedSubject subject() const;
  models::DescribedModel described() const { return models::describe(config, step); }
};

LanguageSubject gpt();
LanguageSubject llama();
LanguageSubject qwen2();

}  // namespace lockstep::plan::testing
