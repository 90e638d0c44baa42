// Models as people write them with torch::nn, which know nothing of ranks, and data for them.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/modules/transformercoder.h>
#include <torch/nn/modules/transformerlayer.h>

#include <lockstep/data/dataset.h>
#include <lockstep/parallel/pipeline/model_blocks.h>

namespace lockstep::plain {

// The base class is the test's, so that one loop trains them all.
struct Net : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& input) = 0;
  // For pipelines; empty where the model cannot be cut into stages.
  virtual std::vector<pipeline::ModelBlock> pipeline_blocks() { return {}; }
};

struct Mlp : Net {
  Mlp() {
    register_module("first", first);
    register_module("second", second);
    register_module("third", third);
  }
  at::Tensor forward(const at::Tensor& x) override {  // [samples, 6] → [samples, 3]
    return third(at::tanh(second(at::tanh(first(x)))));
  }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    using pipeline::block_of;
    return {block_of({first.ptr()}, [this](const at::Tensor& x) { return at::tanh(first(x)); }),
            block_of({second.ptr()}, [this](const at::Tensor& x) { return at::tanh(second(x)); }),
            block_of(third)};
  }
  torch::nn::Linear first{6, 16}, second{16, 9}, third{9, 3};
};

// Drops of what a tensor axis cuts, and of what it leaves whole.
struct MlpWithDropout : Mlp {
  MlpWithDropout() { register_module("drop", drop); }
  at::Tensor forward(const at::Tensor& x) override {
    return third(at::tanh(drop(second(drop(at::tanh(first(x)))))));
  }
  torch::nn::Dropout drop{0.3};
};

struct ConvNet : Net {
  ConvNet() {
    register_module("conv", conv);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {  // [samples, 6] → [samples, 3]
    return head(maps(x));
  }
  at::Tensor maps(const at::Tensor& x) {
    return at::relu(norm(conv(x.view({-1, 1, 2, 3})))).flatten(1);
  }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    using pipeline::block_of;
    return {block_of({conv.ptr(), norm.ptr()}, [this](const at::Tensor& x) { return maps(x); }),
            block_of(head)};
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 4, 2).padding(1)};
  torch::nn::BatchNorm2d norm{4};
  torch::nn::Linear head{4 * 3 * 4, 3};
};

struct Recurrent : Net {
  Recurrent() {
    register_module("lstm", lstm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {  // [samples, 6] → [samples, 3]
    return head(last(x));
  }
  at::Tensor last(const at::Tensor& x) {
    return std::get<0>(lstm(x.view({-1, 3, 2}))).select(1, 2);
  }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    using pipeline::block_of;
    return {block_of({lstm.ptr()}, [this](const at::Tensor& x) { return last(x); }),
            block_of(head)};
  }
  torch::nn::LSTM lstm{torch::nn::LSTMOptions(2, 6).num_layers(2).batch_first(true)};
  torch::nn::Linear head{6, 3};
};

struct Encoder : Net {
  Encoder() {
    register_module("into", into);
    register_module("encoder", encoder);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {  // [samples, 6] → [samples, 3]
    return classes(encoder(steps(x)));
  }
  at::Tensor steps(const at::Tensor& x) { return into(x.view({-1, 3, 2})).transpose(0, 1); }
  at::Tensor classes(const at::Tensor& x) { return head(x.mean(0)); }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    using pipeline::block_of;
    return pipeline::in_a_row(
        block_of({into.ptr()}, [this](const at::Tensor& x) { return steps(x); }),
        pipeline::blocks_of<torch::nn::TransformerEncoderLayer>(*encoder->layers),
        block_of({head.ptr()}, [this](const at::Tensor& x) { return classes(x); }));
  }
  torch::nn::Linear into{2, 8};
  torch::nn::TransformerEncoder encoder{torch::nn::TransformerEncoderOptions(
      torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0)),
      2)};
  torch::nn::Linear head{8, 3};
};

struct Block : torch::nn::Module {
  Block() {
    register_module("norm1", norm1);
    register_module("qkv", qkv);
    register_module("out", out);
    register_module("norm2", norm2);
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(at::Tensor x) {  // [samples, positions, 8]
    const auto parts = qkv(norm1(x)).view({x.size(0), x.size(1), 3, 2, 4}).permute({2, 0, 3, 1, 4});
    const at::Tensor scores = at::matmul(parts[0], parts[1].transpose(2, 3)) / 2;
    const at::Tensor later = at::ones({x.size(1), x.size(1)}, at::kBool).triu(1).to(x.device());
    const at::Tensor mixed = at::matmul(scores.masked_fill(later, -INFINITY).softmax(-1), parts[2]);
    x = x + out(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), 8}));
    return x + fc2(at::gelu(fc1(norm2(x))));
  }
  torch::nn::LayerNorm norm1{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear qkv{8, 24}, out{8, 8};
  torch::nn::LayerNorm norm2{torch::nn::LayerNormOptions({8})};
  torch::nn::Linear fc1{8, 32}, fc2{32, 8};
};

// The head shares the embedding's weights.
struct Gpt : Net {
  Gpt() {
    register_module("tokens", tokens);
    positions = register_parameter("positions", at::randn({6, 8}) * 0.02);
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) blocks->push_back(std::make_shared<Block>());
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) override {  // [samples, 6] → [samples, 11]
    at::Tensor hidden = embedded(x);
    for (const auto& block : *blocks) hidden = block->as<Block>()->forward(hidden);
    return scores(hidden);
  }
  at::Tensor embedded(const at::Tensor& x) {
    // The inputs of the other models, as tokens.
    const at::Tensor ids = (x * 4).abs().clamp(0, 10).to(at::kLong);
    return tokens(ids) + positions;
  }
  at::Tensor scores(const at::Tensor& x) { return at::matmul(norm(x).mean(1), tokens->weight.t()); }
  // The positions are no block's.
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    using pipeline::block_of;
    return pipeline::in_a_row(
        block_of({tokens.ptr()}, [this](const at::Tensor& x) { return embedded(x); }),
        pipeline::blocks_of<Block>(*blocks),
        block_of({norm.ptr(), tokens.ptr()}, [this](const at::Tensor& x) { return scores(x); }));
  }
  torch::nn::Embedding tokens{11, 8};
  at::Tensor positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({8})};
};

// Trains from its second block on.
struct PartlyFrozenGpt : Gpt {
  PartlyFrozenGpt() {
    tokens->weight.requires_grad_(false);
    positions.requires_grad_(false);
    for (const at::Tensor& parameter : blocks[0]->parameters()) parameter.requires_grad_(false);
  }
};

// Points and classes that follow from their numbers.
class Points : public data::Dataset {
 public:
  explicit Points(std::int64_t size) : size_(size) {}
  std::int64_t size() const override { return size_; }
  data::Batch batch(std::span<const std::int64_t> indices) const override {
    const at::Tensor numbers =
        at::tensor(at::ArrayRef<std::int64_t>(indices.data(), indices.size()));
    const at::Tensor phases = numbers.to(at::get_default_dtype()).unsqueeze(1) * 0.7 +
                              at::arange(6, at::get_default_dtype());
    return {.input = at::sin(phases * 1.3) * 1.5, .target = numbers.remainder(3)};
  }

 private:
  std::int64_t size_;
};

inline at::Tensor mean_loss(const at::Tensor& output, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(output, target);
}

}  // namespace lockstep::plain
