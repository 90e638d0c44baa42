#include <lockstep/models/llama/llama.h>

#include <string>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/models/keepable_attention.h>
#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/dropout.h>
#include <lockstep/nn/layers/norms.h>
#include <lockstep/nn/layers/rotary.h>

namespace lockstep::models {

namespace {

using RandomState = std::shared_ptr<const nn::RandomState>;
using Axes = std::shared_ptr<const ModelAxes>;
using Intervals = std::vector<mesh::Interval>;

nn::Linear linear(std::int64_t in, std::int64_t out) { return nn::Linear(in, out, nn::Bias::none); }

// In these modules x is [batch, length, hidden], and `name` is the module's name in the whole
// model.

// All layers turn by the same angles, so they share one table of them.
class LlamaAttention : public torch::nn::Module {
 public:
  LlamaAttention(const ModelConfig& config, nn::Bias qkv_bias, std::size_t layer,
                 std::shared_ptr<nn::Rotary> rotary, Axes axes)
      : layer_(layer),
        head_dim_(config.head_dim),
        rotary_(std::move(rotary)),
        axes_(std::move(axes)),
        q_proj_(register_module("q_proj", heads(config, config.num_heads, qkv_bias))),
        k_proj_(register_module("k_proj", heads(config, config.num_kv_heads, qkv_bias))),
        v_proj_(register_module("v_proj", heads(config, config.num_kv_heads, qkv_bias))),
        o_proj_(register_module("o_proj",
                                linear(config.num_heads * config.head_dim, config.hidden_size))) {}

  at::Tensor forward(const at::Tensor& x, const Intervals& positions, KeyValueCache* cache) {
    const auto qkv = nn::linears(x, {q_proj_.get(), k_proj_.get(), v_proj_.get()});
    const auto q = rotary_->apply(split_heads(qkv[0]), positions);
    KeyValueCache::KeysAndValues kv{rotary_->apply(split_heads(qkv[1]), positions),
                                    split_heads(qkv[2])};
    if (cache != nullptr) kv = cache->append(layer_, kv);
    return o_proj_(keepable_attention(q, kv, *axes_).transpose(1, 2).flatten(2));
  }

 private:
  static nn::Linear heads(const ModelConfig& config, std::int64_t count, nn::Bias bias) {
    return nn::Linear(config.hidden_size, count * config.head_dim, bias);
  }
  // Returns [batch, heads, length, head_dim].
  at::Tensor split_heads(const at::Tensor& x) const {
    return x.unflatten(-1, {-1, head_dim_}).transpose(1, 2);
  }

  std::size_t layer_;
  std::int64_t head_dim_;
  std::shared_ptr<nn::Rotary> rotary_;
  Axes axes_;
  nn::Linear q_proj_, k_proj_, v_proj_, o_proj_;
};

class LlamaMlp : public torch::nn::Module {
 public:
  explicit LlamaMlp(const ModelConfig& config)
      : gate_proj_(
            register_module("gate_proj", linear(config.hidden_size, config.intermediate_size))),
        up_proj_(register_module("up_proj", linear(config.hidden_size, config.intermediate_size))),
        down_proj_(
            register_module("down_proj", linear(config.intermediate_size, config.hidden_size))) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto both = nn::linears(x, {gate_proj_.get(), up_proj_.get()});
    return down_proj_(nn::silu_multiply(both[0], both[1]));
  }

 private:
  nn::Linear gate_proj_, up_proj_, down_proj_;
};

class LlamaLayer : public torch::nn::Module {
 public:
  LlamaLayer(const ModelConfig& config, nn::Bias qkv_bias, std::size_t layer,
             const std::string& name, const RandomState& random,
             const std::shared_ptr<nn::Rotary>& rotary, const Axes& axes)
      : input_layernorm_(
            register_module("input_layernorm", nn::RMSNorm(config.hidden_size, config.norm_eps))),
        self_attn_(register_module(
            "self_attn", std::make_shared<LlamaAttention>(config, qkv_bias, layer, rotary, axes))),
        attn_dropout_(register_module("attn_dropout",
                                      nn::Dropout(config.dropout, name + ".attn_dropout", random))),
        post_attention_layernorm_(register_module(
            "post_attention_layernorm", nn::RMSNorm(config.hidden_size, config.norm_eps))),
        mlp_(register_module("mlp", std::make_shared<LlamaMlp>(config))),
        mlp_dropout_(register_module("mlp_dropout",
                                     nn::Dropout(config.dropout, name + ".mlp_dropout", random))) {}

  at::Tensor forward(const at::Tensor& x, const Intervals& positions, KeyValueCache* cache) {
    const at::Tensor attended =
        attn_dropout_(self_attn_->forward(input_layernorm_(x), positions, cache));
    const auto [y, normed] = nn::add_rms_norm(x, attended, post_attention_layernorm_->weights());
    return y + mlp_dropout_(mlp_->forward(normed));
  }

 private:
  nn::RMSNorm input_layernorm_;
  std::shared_ptr<LlamaAttention> self_attn_;
  nn::Dropout attn_dropout_;
  nn::RMSNorm post_attention_layernorm_;
  std::shared_ptr<LlamaMlp> mlp_;
  nn::Dropout mlp_dropout_;
};

}  // namespace

class Llama::Decoder : public torch::nn::Module {
 public:
  Decoder(const ModelConfig& config, nn::Bias qkv_bias, const std::string& name,
          const RandomState& random, const Axes& axes, const BlockList& blocks)
      : embed_tokens(
            register_module("embed_tokens", nn::Embedding(config.vocab_size, config.hidden_size))),
        drop_(register_module("drop", nn::Dropout(config.dropout, name + ".drop", random))),
        layers_(register_module("layers", blocks)),
        norm_(register_module("norm", nn::RMSNorm(config.hidden_size, config.norm_eps))) {
    const auto rotary =
        std::make_shared<nn::Rotary>(config.head_dim, config.max_positions, config.rope_theta);
    for (std::size_t i = 0; i < static_cast<std::size_t>(config.num_layers); ++i)
      layers_->push_back(std::make_shared<LlamaLayer>(
          config, qkv_bias, i, fmt::format("{}.layers.{}", name, i), random, rotary, axes));
  }

  at::Tensor embed(const at::Tensor& tokens) { return drop_(embed_tokens(tokens)); }
  at::Tensor run_block(std::size_t block, const at::Tensor& x, const Intervals& positions,
                       KeyValueCache* cache) {
    return layers_->call<LlamaLayer>(block, x, positions, cache);
  }
  at::Tensor last_norm(const at::Tensor& x) { return norm_(x); }

  nn::Embedding embed_tokens;

 private:
  nn::Dropout drop_;
  BlockList layers_;
  nn::RMSNorm norm_;
};

Llama::Llama(const ModelConfig& config, std::uint64_t seed, nn::Bias qkv_bias)
    : LanguageModel(config, seed) {
  const auto& c = this->config();
  model_ = register_module("model", std::make_shared<Decoder>(c, qkv_bias, "model", random_state(),
                                                              axes_state(), blocks()));
  if (!c.tie_embeddings) lm_head_ = register_module("lm_head", linear(c.hidden_size, c.vocab_size));
}

at::Tensor Llama::embed(const at::Tensor& tokens, const ModelAxes::Positions&) {
  return model_->embed(tokens);
}

at::Tensor Llama::run_block(std::size_t block, const at::Tensor& x,
                            const ModelAxes::Positions& positions, KeyValueCache* cache) {
  return model_->run_block(block, x, positions.attended, cache);
}

at::Tensor Llama::last_norm(const at::Tensor& x) { return model_->last_norm(x); }

void Llama::drop(Ends kept) {
  const bool tied = lm_head_.is_empty();
  if (!kept.embeddings && !(tied && kept.output)) drop_module(*model_, "embed_tokens");
  if (!kept.output) drop_module(*model_, "norm");
  if (!kept.output && !tied) drop_module(*this, "lm_head");
}

const at::Tensor& Llama::output_weight() const {
  return lm_head_.is_empty() ? model_->embed_tokens->weight : lm_head_->weight;
}

}  // namespace lockstep::models
