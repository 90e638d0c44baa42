#include <lockstep/models/gpt2/gpt.h>

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/normalization.h>

#include <lockstep/base/error.h>
#include <lockstep/models/keepable_attention.h>
#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/dropout.h>
#include <lockstep/nn/layers/norms.h>

namespace lockstep::models {

namespace {

using RandomState = std::shared_ptr<const nn::RandomState>;
using Axes = std::shared_ptr<const ModelAxes>;

torch::nn::LayerNorm layer_norm(const ModelConfig& config) {
  return torch::nn::LayerNorm(
      torch::nn::LayerNormOptions({config.hidden_size}).eps(config.norm_eps));
}

// In these modules x is [batch, length, hidden], and `name` is the module's name in the whole
// model.

class GptAttention : public torch::nn::Module {
 public:
  GptAttention(const ModelConfig& config, std::size_t layer, const std::string& name,
               const RandomState& random, Axes axes)
      : layer_(layer),
        head_dim_(config.head_dim),
        axes_(std::move(axes)),
        c_attn_(register_module(
            "c_attn", nn::Linear(config.hidden_size, 3 * config.hidden_size, nn::Bias::added))),
        c_proj_(register_module(
            "c_proj", nn::Linear(config.hidden_size, config.hidden_size, nn::Bias::added))),
        resid_dropout_(register_module(
            "resid_dropout", nn::Dropout(config.dropout, name + ".resid_dropout", random))) {}

  at::Tensor forward(const at::Tensor& x, KeyValueCache* cache) {
    const auto qkv = c_attn_(x).chunk(3, -1);
    const auto q = split_heads(qkv[0]);
    KeyValueCache::KeysAndValues kv{split_heads(qkv[1]), split_heads(qkv[2])};
    if (cache != nullptr) kv = cache->append(layer_, kv);
    const auto y = keepable_attention(q, kv, *axes_).transpose(1, 2).flatten(2);
    return resid_dropout_(c_proj_(y));
  }

 private:
  // Returns [batch, heads, length, head_dim].
  at::Tensor split_heads(const at::Tensor& x) const {
    return x.unflatten(-1, {-1, head_dim_}).transpose(1, 2);
  }

  std::size_t layer_;
  std::int64_t head_dim_;
  Axes axes_;
  nn::Linear c_attn_, c_proj_;
  nn::Dropout resid_dropout_;
};

class GptMlp : public torch::nn::Module {
 public:
  GptMlp(const ModelConfig& config, const std::string& name, const RandomState& random)
      : gelu_(config.activation == Activation::gelu_tanh ? nn::GeluKind::tanh : nn::GeluKind::erf),
        c_fc_(register_module(
            "c_fc", nn::Linear(config.hidden_size, config.intermediate_size, nn::Bias::added))),
        c_proj_(register_module(
            "c_proj", nn::Linear(config.intermediate_size, config.hidden_size, nn::Bias::added))),
        dropout_(
            register_module("dropout", nn::Dropout(config.dropout, name + ".dropout", random))) {}

  at::Tensor forward(const at::Tensor& x) { return dropout_(c_proj_(nn::gelu(c_fc_(x), gelu_))); }

 private:
  nn::GeluKind gelu_;
  nn::Linear c_fc_, c_proj_;
  nn::Dropout dropout_;
};

class GptBlock : public torch::nn::Module {
 public:
  GptBlock(const ModelConfig& config, std::size_t layer, const std::string& name,
           const RandomState& random, const Axes& axes)
      : ln_1_(register_module("ln_1", layer_norm(config))),
        attn_(register_module(
            "attn", std::make_shared<GptAttention>(config, layer, name + ".attn", random, axes))),
        ln_2_(register_module("ln_2", layer_norm(config))),
        mlp_(register_module("mlp", std::make_shared<GptMlp>(config, name + ".mlp", random))) {}

  at::Tensor forward(const at::Tensor& x, KeyValueCache* cache) {
    const at::Tensor attended = attn_->forward(nn::layer_norm(x, nn::weights_of(*ln_1_)), cache);
    const auto [y, normed] = nn::add_layer_norm(x, attended, nn::weights_of(*ln_2_));
    return y + mlp_->forward(normed);
  }

 private:
  torch::nn::LayerNorm ln_1_;
  std::shared_ptr<GptAttention> attn_;
  torch::nn::LayerNorm ln_2_;
  std::shared_ptr<GptMlp> mlp_;
};

}  // namespace

class Gpt::Transformer : public torch::nn::Module {
 public:
  Transformer(const ModelConfig& config, const std::string& name, const RandomState& random,
              const Axes& axes, const BlockList& blocks)
      : wte(register_module("wte", nn::Embedding(config.vocab_size, config.hidden_size))),
        wpe_(register_module("wpe", nn::Embedding(config.max_positions, config.hidden_size))),
        drop_(register_module("drop", nn::Dropout(config.dropout, name + ".drop", random))),
        h_(register_module("h", blocks)),
        ln_f_(register_module("ln_f", layer_norm(config))) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(config.num_layers); ++i)
      h_->push_back(
          std::make_shared<GptBlock>(config, i, fmt::format("{}.h.{}", name, i), random, axes));
  }

  at::Tensor embed(const at::Tensor& tokens, const ModelAxes::Positions& positions) {
    std::vector<at::Tensor> between;
    for (const mesh::Interval& one : positions.between)
      between.push_back(at::arange(one.begin, one.end, tokens.options()));
    const at::Tensor words = wte(tokens);
    const at::Tensor places = wpe_(at::cat(between));
    return drop_(words + places);
  }
  at::Tensor run_block(std::size_t block, const at::Tensor& x, KeyValueCache* cache) {
    return h_->call<GptBlock>(block, x, cache);
  }
  at::Tensor last_norm(const at::Tensor& x) { return nn::layer_norm(x, nn::weights_of(*ln_f_)); }

  nn::Embedding wte;

 private:
  nn::Embedding wpe_;
  nn::Dropout drop_;
  BlockList h_;
  torch::nn::LayerNorm ln_f_;
};

Gpt::Gpt(const ModelConfig& config, std::uint64_t seed) : LanguageModel(config, seed) {
  const auto& c = this->config();
  transformer_ = register_module(
      "transformer",
      std::make_shared<Transformer>(c, "transformer", random_state(), axes_state(), blocks()));
  if (!c.tie_embeddings)
    lm_head_ = register_module("lm_head", nn::Linear(c.hidden_size, c.vocab_size, nn::Bias::none));
}

at::Tensor Gpt::embed(const at::Tensor& tokens, const ModelAxes::Positions& positions) {
  return transformer_->embed(tokens, positions);
}

at::Tensor Gpt::run_block(std::size_t block, const at::Tensor& x, const ModelAxes::Positions&,
                          KeyValueCache* cache) {
  return transformer_->run_block(block, x, cache);
}

at::Tensor Gpt::last_norm(const at::Tensor& x) { return transformer_->last_norm(x); }

void Gpt::drop(Ends kept) {
  const bool tied = lm_head_.is_empty();
  if (!kept.embeddings) drop_module(*transformer_, "wpe");
  if (!kept.embeddings && !(tied && kept.output)) drop_module(*transformer_, "wte");
  if (!kept.output) drop_module(*transformer_, "ln_f");
  if (!kept.output && !tied) drop_module(*this, "lm_head");
}

const at::Tensor& Gpt::output_weight() const {
  return lm_head_.is_empty() ? transformer_->wte->weight : lm_head_->weight;
}

}  // namespace lockstep::models
