// The family's module.
#include "token_mlp.h"

#include <ATen/ATen.h>

#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/norms.h>
#include <lockstep/nn/tensor_parallel/tensor_parallel.h>

namespace {

using namespace lockstep;
using models::ModelConfig;

class Block : public torch::nn::Module {
 public:
  explicit Block(const ModelConfig& config)
      : norm_(register_module("norm", nn::RMSNorm(config.hidden_size, config.norm_eps))),
        up_(register_module(
            "up", nn::Linear(config.hidden_size, config.intermediate_size, nn::Bias::added))),
        down_(register_module(
            "down", nn::Linear(config.intermediate_size, config.hidden_size, nn::Bias::added))) {}

  // Takes and returns [batch, length, width].
  at::Tensor forward(const at::Tensor& x) {
    return x + down_(nn::gelu(up_(norm_(x)), nn::GeluKind::tanh));
  }

 private:
  nn::RMSNorm norm_;
  nn::Linear up_, down_;
};

class TokenMlp : public models::LanguageModel {
 public:
  TokenMlp(const ModelConfig& given, std::uint64_t seed) : LanguageModel(given, seed) {
    const ModelConfig& config = this->config();
    words_ = register_module("words", nn::Embedding(config.vocab_size, config.hidden_size));
    blocks_ = register_module("blocks", blocks());
    for (std::int64_t i = 0; i < config.num_layers; ++i)
      blocks_->push_back(std::make_shared<Block>(config));
    norm_ = register_module("norm", nn::RMSNorm(config.hidden_size, config.norm_eps));
    if (!config.tie_embeddings)
      lm_head_ = register_module("lm_head",
                                 nn::Linear(config.hidden_size, config.vocab_size, nn::Bias::none));
  }

 private:
  using Positions = models::ModelAxes::Positions;

  at::Tensor embed(const at::Tensor& tokens, const Positions&) override { return words_(tokens); }
  at::Tensor run_block(std::size_t block, const at::Tensor& x, const Positions&,
                       models::KeyValueCache*) override {
    return blocks_->call<Block>(block, x);
  }
  at::Tensor last_norm(const at::Tensor& x) override { return norm_(x); }
  void drop(Ends kept) override {
    const bool tied = lm_head_.is_empty();
    if (!kept.embeddings && !(tied && kept.output)) drop_module(*this, "words");
    if (!kept.output) drop_module(*this, "norm");
    if (!kept.output && !tied) drop_module(*this, "lm_head");
  }
  const at::Tensor& output_weight() const override {
    return lm_head_.is_empty() ? words_->weight : lm_head_->weight;
  }

  nn::Embedding words_{nullptr};
  BlockList blocks_{nullptr};
  nn::RMSNorm norm_{nullptr};
  nn::Linear lm_head_{nullptr};  // empty if the output layer is the embedding
};

}  // namespace

std::shared_ptr<models::LanguageModel> make_token_mlp(const ModelConfig& config,
                                                      std::uint64_t seed) {
  return std::make_shared<TokenMlp>(config, seed);
}
