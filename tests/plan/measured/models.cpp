#include "models.h"

#include <numeric>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>

#include <lockstep/models/make_model.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

namespace lockstep::plan::testing {

namespace {

namespace nn = torch::nn;

// Batches are made on the model's device.
c10::Device device_of(const nn::Module& module) { return module.parameters().front().device(); }

at::TensorOptions numbers(const nn::Module& module) { return at::device(device_of(module)); }

at::TensorOptions indices(const nn::Module& module) {
  return at::dtype(at::kLong).device(device_of(module));
}

struct Mlp : nn::Module {
  nn::ModuleList layers;
  nn::Linear head;
  Mlp() : head(400, 10) {
    register_module("layers", layers);
    register_module("head", head);
    for (int i = 0; i < 6; ++i) layers->push_back(nn::Linear(400, 400));
  }
  at::Tensor forward(at::Tensor x) {
    for (std::size_t i = 0; i < layers->size(); ++i)
      x = at::relu(layers->ptr<nn::LinearImpl>(i)->forward(x));
    return head(x);
  }
};

struct Reader : nn::Module {
  nn::Embedding words;
  nn::LSTM lstm;
  nn::Linear head;
  Reader()
      : words(1000, 64),
        lstm(nn::LSTMOptions(64, 128).num_layers(2).batch_first(true)),
        head(128, 1000) {
    register_module("words", words);
    register_module("lstm", lstm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& tokens) { return head(std::get<0>(lstm(words(tokens)))); }
};

struct Odd : nn::Module {
  nn::Linear first, frozen, last;
  nn::BatchNorm1d norm;
  Odd() : first(40, 300), frozen(300, 300), last(300, 40), norm(300) {
    register_module("first", first);
    register_module("frozen", frozen);
    register_module("last", last);
    register_module("norm", norm);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = norm(at::tanh(frozen(first(x))));
    // Uses `first` twice.
    return last(h + first(last(h)));
  }
};

}  // namespace

NamedSubject mlp() {
  return {"MLP", [] {
            const auto module = std::make_shared<Mlp>();
            return Subject{
                module, [module] {
                  const auto y = module->forward(at::randn({200, 400}, numbers(*module)));
                  return at::cross_entropy_loss(y, at::randint(10, {200}, indices(*module)));
                }};
          }};
}

NamedSubject lstm() {
  return {"LSTM", [] {
            const auto module = std::make_shared<Reader>();
            return Subject{module, [module] {
                             const auto tokens = at::randint(1000, {6, 20}, indices(*module));
                             return at::cross_entropy_loss(module->forward(tokens).flatten(0, 1),
                                                           tokens.flatten());
                           }};
          }};
}

NamedSubject odd() {
  return {"frozen and shared weights", [] {
            const auto module = std::make_shared<Odd>();
            return Subject{
                module, [module] {
                  return module->forward(at::randn({800, 40}, numbers(*module))).pow(2).mean();
                }};
          }};
}

NamedSubject LanguageSubject::subject() const {
  return {name, [config = config, step = step] {
            const auto model = models::make_model(config, 1);
            if (step.recomputed_blocks > 0)
              SelectiveGradientCheckpointing(*model, step.recomputed_blocks);
            std::vector<std::int64_t> rows(static_cast<std::size_t>(step.micro_batch));
            std::iota(rows.begin(), rows.end(), 0);
            return Subject{model, [model, step, rows] {
                             const auto tokens = at::randint(
                                 model->config().vocab_size,
                                 {step.micro_batch, step.sequence_length}, indices(*model));
                             const auto targets = tokens.clone();
                             model->set_random_position(0, rows);
                             return model->loss(tokens, targets).sum;
                           }};
          }};
}

LanguageSubject gpt() {
  return {.name = "GPT",
          .config = {.family = "gpt2",
                     .vocab_size = 512,
                     .hidden_size = 96,
                     .num_layers = 5,
                     .num_heads = 4,
                     .max_positions = 128},
          .step = {.micro_batch = 3, .sequence_length = 64}};
}

LanguageSubject llama() {
  return {.name = "Llama",
          .config = {.family = "llama",
                     .vocab_size = 700,
                     .hidden_size = 96,
                     .num_layers = 4,
                     .num_heads = 8,
                     .num_kv_heads = 2,
                     .intermediate_size = 264,
                     .max_positions = 128,
                     .tie_embeddings = false},
          .step = {.micro_batch = 3, .sequence_length = 64}};
}

LanguageSubject qwen2() {
  LanguageSubject subject = llama();
  subject.name = "Qwen2";
  subject.config.family = "qwen2";
  return subject;
}

}  // namespace lockstep::plan::testing
