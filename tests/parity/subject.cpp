#include "subject.h"

#include <torch/torch.h>

#include <lockstep/models/make_model.h>

namespace lockstep::parity {

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  return (output - target).pow(2).sum();
}

std::pair<at::Tensor, at::Tensor> regression(std::int64_t samples, at::IntArrayRef input,
                                             at::IntArrayRef target) {
  std::vector<std::int64_t> in = input.vec();
  std::vector<std::int64_t> out = target.vec();
  in.insert(in.begin(), samples);
  out.insert(out.begin(), samples);
  return {at::randn(in), at::randn(out)};
}

template <typename Net>
Subject regression_of(Net net, std::vector<std::int64_t> input, std::vector<std::int64_t> target) {
  return {
      .module = net.ptr(),
      .loss_sum = [net](const at::Tensor& x,
                        const at::Tensor& y) mutable { return squared_error(net->forward(x), y); },
      .make_batch = [=](std::int64_t n) { return regression(n, input, target); }};
}

Subject mlp() {
  nn::Sequential net(nn::Linear(7, 33), nn::ReLU(), nn::Linear(33, 17), nn::Tanh(),
                     nn::Linear(17, 3));
  return regression_of(net, {7}, {3});
}

Subject lstm() {
  nn::LSTM net(nn::LSTMOptions(5, 9).num_layers(2).batch_first(true));
  return {.module = net.ptr(),
          .loss_sum =
              [net](const at::Tensor& x, const at::Tensor& y) mutable {
                return squared_error(std::get<0>(net->forward(x)), y);
              },
          .make_batch =
              [](std::int64_t n) {
                return regression(n, {6, 5}, {6, 9});
              }};
}

Subject conv_batch_norm() {
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8), nn::ReLU(),
                     nn::Conv2d(nn::Conv2dOptions(8, 5, 3).bias(false)), nn::BatchNorm2d(5),
                     nn::Flatten(), nn::Linear(5 * 4 * 4, 10));
  return {.module = net.ptr(),
          .loss_sum =
              [net](const at::Tensor& x, const at::Tensor& y) mutable {
                return F::cross_entropy(net->forward(x), y,
                                        F::CrossEntropyFuncOptions().reduction(torch::kSum));
              },
          .make_batch =
              [](std::int64_t n) {
                return std::pair(at::randn({n, 3, 8, 8}), at::randint(10, {n}, at::kLong));
              }};
}

Subject linear_batch_norm() {
  nn::Sequential net(nn::Linear(6, 9), nn::BatchNorm1d(9), nn::Tanh(), nn::Linear(9, 4),
                     nn::BatchNorm1d(nn::BatchNorm1dOptions(4).affine(false)), nn::Linear(4, 3));
  return regression_of(net, {6}, {3});
}

Subject transformer_encoder() {
  nn::TransformerEncoder net(nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(16, 2).dim_feedforward(32).dropout(0.1), 2));
  return {.module = net.ptr(),
          // The batch is its input's second dimension.
          .loss_sum =
              [net](const at::Tensor& x, const at::Tensor& y) mutable {
                return squared_error(net->forward(x.transpose(0, 1)).transpose(0, 1), y);
              },
          .make_batch =
              [](std::int64_t n) {
                return regression(n, {5, 16}, {5, 16});
              }};
}

// An embedding that is also the head, and a layer that is registered and used twice.
struct SharedImpl : nn::Module {
  nn::Embedding words{nullptr};
  nn::Linear first{nullptr}, second{nullptr};
  SharedImpl() {
    words = register_module("words", nn::Embedding(11, 12));
    first = register_module("first", nn::Linear(12, 12));
    second = register_module("second", first);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::tanh(second(at::tanh(first(words(x))))).matmul(words->weight.t());
  }
};
TORCH_MODULE(Shared);

Subject shared_weights() {
  Shared net;
  return {.module = net.ptr(),
          .loss_sum =
              [net](const at::Tensor& x, const at::Tensor& y) mutable {
                return F::cross_entropy(net->forward(x).flatten(0, 1), y.flatten(),
                                        F::CrossEntropyFuncOptions().reduction(torch::kSum));
              },
          .per_sample = 4,
          .make_batch =
              [](std::int64_t n) {
                return std::pair(at::randint(11, {n, 4}, at::kLong),
                                 at::randint(11, {n, 4}, at::kLong));
              }};
}

// Parameters whose gradients are views of one tensor, which another parameter's backward reads
// later.
struct TablesImpl : nn::Module {
  nn::Linear scores{nullptr};
  at::Tensor rows, cells;
  TablesImpl() {
    scores = register_module("scores", nn::Linear(6, 12));
    rows = register_parameter("rows", at::randn({3, 4}));
    cells = register_parameter("cells", at::randn({12}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor table = rows.unsqueeze(0) + cells.view({1, 3, 4});
    return (scores(x).view({-1, 3, 4}) + table).softmax(-1);
  }
};
TORCH_MODULE(Tables);

Subject tables() {
  Tables net;
  return regression_of(net, {6}, {3, 4});
}

// A frozen layer, a layer that is never used, and a layer that only some batches use.
struct PartlyTrainedImpl : nn::Module {
  nn::Linear frozen{nullptr}, branch{nullptr}, unused{nullptr}, head{nullptr};
  at::Tensor scale;
  PartlyTrainedImpl() {
    frozen = register_module("frozen", nn::Linear(6, 10));
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    branch = register_module("branch", nn::Linear(10, 10));
    unused = register_module("unused", nn::Linear(3, 3));
    head = register_module("head", nn::Linear(10, 2));
    scale = register_parameter("scale", at::ones({10}));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = at::tanh(frozen(x)) * scale;
    if (x[0][0].item<float>() > 0) hidden = hidden + branch(hidden);
    return head(hidden);
  }
};
TORCH_MODULE(PartlyTrained);

Subject partly_trained() {
  PartlyTrained net;
  return regression_of(net, {6}, {2});
}

// One of our own models.
Subject language_model(const models::ModelConfig& config) {
  const auto model = models::make_model(
      config, static_cast<std::uint64_t>(at::randint(100, {}, at::kLong).item<std::int64_t>()));
  return {.module = model,
          .loss_sum = [model](const at::Tensor& x,
                              const at::Tensor& y) { return model->loss(x, y).sum; },
          .per_sample = 5,
          .make_batch =
              [](std::int64_t n) {
                return std::pair(at::randint(23, {n, 5}, at::kLong),
                                 at::randint(23, {n, 5}, at::kLong));
              }};
}

Subject gpt() {
  return language_model({.family = "gpt2",
                         .vocab_size = 23,
                         .hidden_size = 12,
                         .num_layers = 2,
                         .num_heads = 3,
                         .max_positions = 8});
}

Subject llama() {
  return language_model({.family = "llama",
                         .vocab_size = 23,
                         .hidden_size = 16,
                         .num_layers = 2,
                         .num_heads = 4,
                         .num_kv_heads = 2,
                         .intermediate_size = 20,
                         .max_positions = 8,
                         .tie_embeddings = false});
}

Subject qwen2() {
  return language_model({.family = "qwen2",
                         .vocab_size = 23,
                         .hidden_size = 16,
                         .num_layers = 2,
                         .num_heads = 4,
                         .num_kv_heads = 2,
                         .intermediate_size = 20,
                         .max_positions = 8});
}

}  // namespace

const std::vector<SubjectKind>& subject_kinds() {
  static const std::vector<SubjectKind> kinds = {
      {"mlp", mlp},
      {"lstm", lstm},
      {"conv + batch norm", conv_batch_norm, Samples::mixed, Usage::full, 2},
      {"linear + batch norm", linear_batch_norm, Samples::mixed, Usage::full, 2},
      // Its dropout draws from the generator for a whole batch at once.
      {"transformer encoder", transformer_encoder, Samples::mixed},
      {"shared weights", shared_weights},
      {"views of tables", tables},
      {.name = "gpt", .make = gpt, .recomputable = true},
      {.name = "llama", .make = llama, .recomputable = true},
      {.name = "qwen2", .make = qwen2, .recomputable = true},
      // The whole batch decides which branch is taken.
      {"frozen and unused parameters", partly_trained, Samples::mixed, Usage::partial},
  };
  return kinds;
}

}  // namespace lockstep::parity
