#include "plain_modules.h"

#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace lockstep::tensor {

double clip_plain(torch::nn::Module& model, double max_norm) {
  return torch::nn::utils::clip_grad_norm_(model.parameters(), max_norm);
}

std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters) {
  // The epsilon keeps elements with tiny gradients from magnifying their rounding.
  return std::make_unique<torch::optim::AdamW>(
      std::move(parameters), torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-3));
}

std::unique_ptr<torch::optim::Optimizer> momentum(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(
      std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
}

namespace {

using ranks::Cells;

LossOf<PlainMlp> mlp_loss() {
  return [](PlainMlp& model, const at::Tensor& x, int) { return uneven_loss(model.forward(x)); };
}

PlainCase<PlainMlp> mlp_case(const Activation& activation, bool with_bias = true) {
  return {.make = [=] { return std::make_shared<PlainMlp>(activation, with_bias); },
          .loss = mlp_loss(),
          .optimizer = adamw};
}

at::Tensor relu_in_place(const at::Tensor& x) {
  at::Tensor y = x;
  return at::relu_(y);
}

// Passes the same tensor several times, and other tensors, broadcast ones and scalars.
at::Tensor several_functions(const at::Tensor& x) {
  const at::Tensor scale = at::linspace(0.5, 1.5, x.size(-1), x.options());
  return at::silu(x) * scale + at::tanh(x).div(2).clamp(-0.4, 0.4) - at::where(x > 0, x, -x * x);
}

void check_mlps(Cells& cells, const nn::Precision& precision) {
  const auto cell = [&](const std::string& name, const PlainCase<PlainMlp>& one) {
    cells.cell(fmt::format("plain {}, {}", name, precision.text()),
               [&] { expect_same_training(cells, one, precision); });
  };
  const Activation gelu = [](const at::Tensor& x) { return at::gelu(x); };
  for (const std::vector<std::int64_t>& input :
       std::vector<std::vector<std::int64_t>>{{6, 8}, {2, 3, 8}, {8}}) {
    for (const bool with_bias : {true, false}) {
      auto one = mlp_case(gelu, with_bias);
      one.input = input;
      cell(fmt::format("MLP of {} dims{}", input.size(), with_bias ? "" : " without bias"), one);
    }
  }
  for (const bool three_dims : {false, true}) {
    auto one = mlp_case(relu_in_place);
    if (three_dims) one.input = {2, 3, 8};
    one.optimizer = momentum;
    one.max_norm = 0.01;
    cell(fmt::format("MLP in place, clipped{}", three_dims ? ", 3 dims" : ""), one);
  }
  cell("MLP of several functions", mlp_case(several_functions));
  {
    auto one = mlp_case(gelu);
    one.num_passes = 3;
    one.max_norm = 0.01;
    cell("MLP of several passes", one);
  }
  {
    auto one = mlp_case(gelu);
    one.plan = {{"fc1", Cut::column}};
    one.gathers = {"aten::addmm"};
    cell("a column alone", one);
  }
  for (const char* const layer : {"fc1", "fc2"}) {
    auto one = mlp_case(gelu);
    one.plan = {{layer, Cut::row}};
    one.input = {2, 3, 8};
    cell(fmt::format("the row {} alone", layer), one);
  }
  {
    auto one = mlp_case(gelu);
    one.plan = {{"fc*", Cut::row}};
    cell("two rows", one);
  }
  {
    auto one = mlp_case(gelu);
    one.loss = [](PlainMlp& model, const at::Tensor& x, int) {
      return uneven_loss(model.forward(model.forward(x)));
    };
    cell("an MLP used twice", one);
  }
}

void check_residual(Cells& cells, const nn::Precision& precision) {
  const PlainCase<PlainBlocks> one{
      .make = [] { return std::make_shared<PlainBlocks>(); },
      .plan = {{"blocks.*.fc1", Cut::column}, {"blocks.*.fc2", Cut::row}},
      .input = {2, 3, 8},
      .loss = [](PlainBlocks& model, const at::Tensor& x,
                 int) { return uneven_loss(model.forward(x)); },
      .optimizer = adamw,
      .max_norm = 0.01};
  cells.cell(fmt::format("plain residual blocks, {}", precision.text()),
             [&] { expect_same_training(cells, one, precision); });
}

template <typename Model>
PlainCase<Model> transformer_case(const std::function<std::shared_ptr<Model>()>& make) {
  return {
      .make = make,
      .plan = {{"linear1", Cut::column}, {"linear2", Cut::row}},
      .input = {5, 2, 8},
      .loss = [](Model& model, const at::Tensor& x, int) { return uneven_loss(model.forward(x)); },
      .optimizer = momentum};
}

// As in torch::nn: in training, with dropout between the two layers.
void check_transformer(Cells& cells, const nn::Precision& precision) {
  const auto options =
      torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0.25);
  using Layer = torch::nn::TransformerEncoderLayerImpl;
  using Encoder = torch::nn::TransformerEncoderImpl;
  const auto layer = transformer_case<Layer>([=] { return std::make_shared<Layer>(options); });
  cells.cell(fmt::format("TransformerEncoderLayer, {}", precision.text()),
             [&] { expect_same_training(cells, layer, precision); });
  auto encoder = transformer_case<Encoder>([=] {
    return std::make_shared<Encoder>(
        torch::nn::TransformerEncoderOptions(torch::nn::TransformerEncoderLayer(options), 2));
  });
  encoder.plan = {{"layers.*.linear1", Cut::column}, {"layers.*.linear2", Cut::row}};
  cells.cell(fmt::format("TransformerEncoder, {}", precision.text()),
             [&] { expect_same_training(cells, encoder, precision); });
  auto attention = layer;
  attention.plan.push_back({"self_attn.out_proj", Cut::row});
  cells.cell(fmt::format("attention's output, {}", precision.text()),
             [&] { expect_same_training(cells, attention, precision); });
}

struct Words : torch::nn::Module {
  Words()
      : table(register_module(
            "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(16, 8).padding_idx(5)))),
        fc(register_module("fc", torch::nn::Linear(8, 4))) {}

  at::Tensor forward(const at::Tensor& words, const at::Tensor& x) { return fc(table(words) + x); }

  torch::nn::Embedding table;
  torch::nn::Linear fc;
};

void check_tables(Cells& cells, const nn::Precision& precision) {
  for (const Cut cut : {Cut::column, Cut::row}) {
    const PlainCase<Words> one{
        .make = [] { return std::make_shared<Words>(); },
        .plan = {{"table", cut}, {"fc", Cut::row}},
        .input = {3, 5, 8},
        .loss =
            [](Words& model, const at::Tensor& x, int number) {
              const at::Tensor words =
                  (at::arange(15, x.options().dtype(at::kLong)) * (number + 7)) % 16;
              return uneven_loss(model.forward(words.view({3, 5}), x));
            },
        .optimizer = momentum};
    cells.cell(fmt::format("plain embedding cut by {}, {}", cut == Cut::row ? "tokens" : "features",
                           precision.text()),
               [&] { expect_same_training(cells, one, precision); });
  }
}

}  // namespace

void check_plain_modules(Cells& cells) {
  std::vector<nn::Precision> precisions(std::begin(kPlainPrecisions), std::end(kPlainPrecisions));
  if (at::hasCUDA())
    precisions.push_back({.type = at::kDouble, .tolerance = 1e-9, .device = at::kCUDA});
  for (const nn::Precision& precision : precisions) {
    check_mlps(cells, precision);
    check_residual(cells, precision);
    check_transformer(cells, precision);
    check_tables(cells, precision);
  }
}

}  // namespace lockstep::tensor
