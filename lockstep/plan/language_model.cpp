#include <lockstep/plan/language_model.h>

#include <memory>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/base/even_share.h>
#include <lockstep/plan/layers.h>

namespace lockstep::plan {

namespace {

using Value = Tape::Value;

// Each mirrors the module of its name in lockstep/models: parameters in the order in which that
// registers them, and forward as it is written there. What is done to the tape is done in one
// statement after the other: which argument of a call comes first is the compiler's choice.

class GptBlock {
 public:
  GptBlock(Layers& layers, const models::ModelConfig& config)
      : layers_(layers),
        config_(config),
        ln_1_(layers.layer_norm(config.hidden_size)),
        c_attn_(layers.linear(config.hidden_size, 3 * config.hidden_size, HasBias::yes)),
        c_proj_(layers.linear(config.hidden_size, config.hidden_size, HasBias::yes)),
        ln_2_(layers.layer_norm(config.hidden_size)),
        c_fc_(layers.linear(config.hidden_size, config.intermediate_size, HasBias::yes)),
        mlp_proj_(layers.linear(config.intermediate_size, config.hidden_size, HasBias::yes)) {}

  Value forward(const Value& x) const {
    const Value y = layers_.tape().add(x, attention(layers_.apply(ln_1_, x)));
    return layers_.tape().add(y, mlp(layers_.apply(ln_2_, y)));
  }

 private:
  Value attention(const Value& x) const {
    const Value projected = layers_.apply(c_attn_, x);
    const std::int64_t part = projected.bytes / 3;
    const auto qkv = layers_.tape().split(projected, {part, part, part});
    const Value y = layers_.attention(qkv[0], qkv[1], qkv[2], config_.num_heads);
    return layers_.dropout(layers_.apply(c_proj_, y), config_.dropout);
  }
  Value mlp(const Value& x) const {
    return layers_.dropout(layers_.apply(mlp_proj_, layers_.gelu(layers_.apply(c_fc_, x))),
                           config_.dropout);
  }

  Layers& layers_;
  const models::ModelConfig& config_;
  Norm ln_1_;
  Linear c_attn_, c_proj_;
  Norm ln_2_;
  Linear c_fc_, mlp_proj_;
};

class LlamaBlock {
 public:
  LlamaBlock(Layers& layers, const models::ModelConfig& config)
      : layers_(layers),
        config_(config),
        input_layernorm_(layers.rms_norm(config.hidden_size)),
        q_proj_(layers.linear(config.hidden_size, config.num_heads * config.head_dim)),
        k_proj_(layers.linear(config.hidden_size, config.num_kv_heads * config.head_dim)),
        v_proj_(layers.linear(config.hidden_size, config.num_kv_heads * config.head_dim)),
        o_proj_(layers.linear(config.num_heads * config.head_dim, config.hidden_size)),
        post_attention_layernorm_(layers.rms_norm(config.hidden_size)),
        gate_proj_(layers.linear(config.hidden_size, config.intermediate_size)),
        up_proj_(layers.linear(config.hidden_size, config.intermediate_size)),
        down_proj_(layers.linear(config.intermediate_size, config.hidden_size)) {}

  Value forward(const Value& x) const {
    const Value y = layers_.tape().add(
        x, layers_.dropout(attention(layers_.apply(input_layernorm_, x)), config_.dropout));
    return layers_.tape().add(
        y, layers_.dropout(mlp(layers_.apply(post_attention_layernorm_, y)), config_.dropout));
  }

 private:
  Value attention(const Value& x) const {
    const Value q = layers_.rotary(layers_.apply(q_proj_, x));
    const Value k = layers_.rotary(layers_.apply(k_proj_, x));
    const Value v = layers_.apply(v_proj_, x);
    return layers_.apply(o_proj_, layers_.attention(q, k, v, config_.num_heads));
  }
  Value mlp(const Value& x) const {
    const Value gate = layers_.apply(gate_proj_, x);
    const Value up = layers_.apply(up_proj_, x);
    return layers_.apply(down_proj_, layers_.silu_multiply(gate, up));
  }

  Layers& layers_;
  const models::ModelConfig& config_;
  Norm input_layernorm_;
  Linear q_proj_, k_proj_, v_proj_, o_proj_;
  Norm post_attention_layernorm_;
  Linear gate_proj_, up_proj_, down_proj_;
};

// Backward calls those again that are recomputed: they live as long as it needs them.
template <typename Block>
using Blocks = std::vector<std::shared_ptr<const Block>>;

template <typename Block>
Blocks<Block> make_blocks(Layers& layers, const models::ModelConfig& config) {
  Blocks<Block> blocks;
  for (std::int64_t i = 0; i < config.num_layers; ++i) {
    layers.begin_block(static_cast<std::size_t>(i));
    blocks.push_back(std::make_shared<const Block>(layers, config));
  }
  layers.end_blocks();
  return blocks;
}

template <typename Block>
Value through_blocks(Layers& layers, const Blocks<Block>& blocks, Value x, double recomputed) {
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const auto forward = [block = blocks[i]](const Value& input) { return block->forward(input); };
    x = is_in_share(i, blocks.size(), recomputed) ? layers.tape().recompute(forward, x)
                                                  : forward(x);
  }
  return x;
}

Value embed(Layers& layers, const Embedding& wte, const Embedding& wpe,
            const models::ModelConfig& config, const LanguageModelStep& step) {
  const Value words = layers.look_up(wte, layers.num_tokens());
  const Value places = layers.look_up(wpe, step.sequence_length);
  return layers.dropout(layers.tape().add(words, places), config.dropout);
}

Value gpt(Layers& layers, const models::ModelConfig& config, const LanguageModelStep& step) {
  const Embedding wte = layers.embedding(config.vocab_size, config.hidden_size);
  const Embedding wpe = layers.embedding(config.max_positions, config.hidden_size);
  const auto blocks = make_blocks<GptBlock>(layers, config);
  const Norm ln_f = layers.layer_norm(config.hidden_size);
  const Embedding head =
      config.tie_embeddings ? wte : layers.embedding(config.vocab_size, config.hidden_size);

  Value x = embed(layers, wte, wpe, config, step);
  x = through_blocks(layers, blocks, std::move(x), step.recomputed_blocks);
  const Value hidden = layers.apply(ln_f, std::exchange(x, {}));
  return layers.linear_cross_entropy(hidden, head);
}

Value llama(Layers& layers, const models::ModelConfig& config, const LanguageModelStep& step) {
  const Embedding embed_tokens = layers.embedding(config.vocab_size, config.hidden_size);
  const auto blocks = make_blocks<LlamaBlock>(layers, config);
  const Norm norm = layers.rms_norm(config.hidden_size);
  const Embedding head = config.tie_embeddings
                             ? embed_tokens
                             : layers.embedding(config.vocab_size, config.hidden_size);

  Value x = layers.dropout(layers.look_up(embed_tokens, layers.num_tokens()), config.dropout);
  x = through_blocks(layers, blocks, std::move(x), step.recomputed_blocks);
  const Value hidden = layers.apply(norm, std::exchange(x, {}));
  return layers.linear_cross_entropy(hidden, head);
}

void check(const LanguageModelStep& step) {
  if (step.micro_batch < 1 || step.sequence_length < 1)
    throw UsageError("a micro-batch of {} sequences of {} tokens: give at least one of each",
                     step.micro_batch, step.sequence_length);
  if (!(step.recomputed_blocks >= 0 && step.recomputed_blocks <= 1))
    throw UsageError("the share of blocks to recompute is {}: give a number from 0 to 1",
                     step.recomputed_blocks);
}

}  // namespace

DescribedModel describe(const models::ModelConfig& given, const LanguageModelStep& step) {
  const models::ModelConfig config = models::resolved(given);
  check(step);
  Layers layers({.num_tokens = step.micro_batch * step.sequence_length,
                 .element_bytes = bytes_of(step.precision),
                 .kernels = step.device == Device::gpu          ? Kernels::gpu
                            : step.precision == Precision::fp32 ? Kernels::cpu
                                                                : Kernels::libtorch});
  // The tokens, and what is to come after each.
  const Value batch = layers.tape().input(2 * layers.num_tokens() * 8);
  Value loss = config.family == models::Family::gpt2 ? gpt(layers, config, step)
                                                     : llama(layers, config, step);
  DescribedModel described;
  described.trace = layers.tape().backward(std::move(loss));
  described.sizes = layers.sizes();
  if (config.family == models::Family::llama)
    described.sizes.buffer_bytes = step.sequence_length * config.head_dim * 4;  // rotary angles
  return described;
}

}  // namespace lockstep::plan
