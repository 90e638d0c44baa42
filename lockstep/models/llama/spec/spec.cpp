#include <lockstep/models/llama/spec/spec.h>

#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/models/spec/training_step.h>

namespace lockstep::models {

namespace {

using plan::Tape;

ModelConfig read_llama(const ConfigKeys& keys) {
  keys.need("attention_bias", false);
  keys.need("mlp_bias", false);
  return read_decoder_keys(keys, {.vocab_size = 32000,
                                  .hidden_size = 4096,
                                  .num_layers = 32,
                                  .num_heads = 32,
                                  .intermediate_size = 11008,
                                  .max_positions = 2048,
                                  .norm_eps = 1e-6,
                                  .tie_embeddings = false});
}

void write_llama(const ModelConfig& config, nlohmann::ordered_json& object) {
  object["architectures"] = {"LlamaForCausalLM"};
  write_decoder_keys(config, object);
  object.update({{"attention_bias", false}, {"mlp_bias", false}});
}

// These mirror the modules in llama/llama.cpp: they register parameters in the same order, and run
// the same forward.
class LlamaTapeBlock {
 public:
  LlamaTapeBlock(plan::Layers& layers, const ModelConfig& config, plan::HasBias qkv_bias)
      : layers_(layers),
        config_(config),
        input_layernorm_(layers.rms_norm(config.hidden_size)),
        q_proj_(layers.linear(config.hidden_size, config.num_heads * config.head_dim, qkv_bias)),
        k_proj_(layers.linear(config.hidden_size, config.num_kv_heads * config.head_dim, qkv_bias)),
        v_proj_(layers.linear(config.hidden_size, config.num_kv_heads * config.head_dim, qkv_bias)),
        o_proj_(layers.linear(config.num_heads * config.head_dim, config.hidden_size)),
        post_attention_layernorm_(layers.rms_norm(config.hidden_size)),
        gate_proj_(layers.linear(config.hidden_size, config.intermediate_size)),
        up_proj_(layers.linear(config.hidden_size, config.intermediate_size)),
        down_proj_(layers.linear(config.intermediate_size, config.hidden_size)) {}

  Tape::Value operator()(const Tape::Value& x) const {
    const Tape::Value y = layers_.tape().add(
        x, layers_.dropout(attention(layers_.apply(input_layernorm_, x)), config_.dropout));
    return layers_.tape().add(
        y, layers_.dropout(mlp(layers_.apply(post_attention_layernorm_, y)), config_.dropout));
  }

 private:
  // One statement for each product, because a compiler may evaluate the arguments of a call in any
  // order.
  Tape::Value attention(const Tape::Value& x) const {
    const Tape::Value q = layers_.rotary(layers_.apply(q_proj_, x));
    const Tape::Value k = layers_.rotary(layers_.apply(k_proj_, x));
    const Tape::Value v = layers_.apply(v_proj_, x);
    return layers_.apply(o_proj_, layers_.attention(q, k, v, config_.num_heads));
  }
  Tape::Value mlp(const Tape::Value& x) const {
    const Tape::Value gate = layers_.apply(gate_proj_, x);
    const Tape::Value up = layers_.apply(up_proj_, x);
    return layers_.apply(down_proj_, layers_.silu_multiply(gate, up));
  }

  plan::Layers& layers_;
  const ModelConfig& config_;
  plan::Norm input_layernorm_;
  plan::Linear q_proj_, k_proj_, v_proj_, o_proj_;
  plan::Norm post_attention_layernorm_;
  plan::Linear gate_proj_, up_proj_, down_proj_;
};

}  // namespace

std::vector<Layer> llama_layers(const ModelConfig& config, plan::HasBias qkv_bias) {
  using Kind = Layer::Kind;
  using Cut = Layer::Cut;
  const std::int64_t hidden = config.hidden_size, inside = config.intermediate_size;
  const auto norm = [&](const char* name) {
    return Layer{.name = name, .kind = Kind::norm, .out = hidden};
  };
  const auto heads = [&](const char* name, std::int64_t count) {
    return Layer{.name = name,
                 .out = count * config.head_dim,
                 .in = hidden,
                 .has_bias = qkv_bias == plan::HasBias::yes,
                 .cut = Cut::columns,
                 .unit = config.head_dim};
  };
  const auto up = [&](const char* name) {
    return Layer{.name = name, .out = inside, .in = hidden, .cut = Cut::columns};
  };
  return {{.name = "model.embed_tokens",
           .kind = Kind::embedding,
           .out = config.vocab_size,
           .in = hidden,
           .cut = Cut::vocabulary},
          norm("model.layers.*.input_layernorm"),
          heads("model.layers.*.self_attn.q_proj", config.num_heads),
          heads("model.layers.*.self_attn.k_proj", config.num_kv_heads),
          heads("model.layers.*.self_attn.v_proj", config.num_kv_heads),
          {.name = "model.layers.*.self_attn.o_proj",
           .out = hidden,
           .in = config.num_heads * config.head_dim,
           .cut = Cut::rows},
          norm("model.layers.*.post_attention_layernorm"),
          up("model.layers.*.mlp.gate_proj"),
          up("model.layers.*.mlp.up_proj"),
          {.name = "model.layers.*.mlp.down_proj", .out = hidden, .in = inside, .cut = Cut::rows},
          norm("model.norm")};
}

plan::Tape::Value llama_loss(plan::Layers& layers, const ModelConfig& config,
                             const LanguageModelStep& step, plan::HasBias qkv_bias) {
  const plan::Embedding embed_tokens = layers.embedding(config.vocab_size, config.hidden_size);
  const auto blocks = tape_blocks(layers, config.num_layers, [&]() -> TapeBlock {
    return LlamaTapeBlock(layers, config, qkv_bias);
  });
  const plan::Norm norm = layers.rms_norm(config.hidden_size);
  const plan::Embedding head = config.tie_embeddings
                                   ? embed_tokens
                                   : layers.embedding(config.vocab_size, config.hidden_size);
  Tape::Value x = layers.dropout(layers.look_up(embed_tokens, layers.num_tokens()), config.dropout);
  x = through_blocks(layers, blocks, std::move(x), step.recomputed_blocks);
  const Tape::Value hidden = layers.apply(norm, std::exchange(x, {}));
  return layers.linear_cross_entropy(hidden, head);
}

std::int64_t swiglu_width(std::int64_t hidden_size) {
  constexpr std::int64_t kMultiple = 64;
  return (8 * hidden_size / 3 + kMultiple - 1) / kMultiple * kMultiple;
}

Family llama() {
  return {.name = "llama",
          .title = "Llama",
          .about = "rotary positions, RMSNorm, SwiGLU, grouped queries; 8/3 × width inside the "
                   "MLP, up to a multiple of 64",
          .rotary = true,
          .grouped_queries = true,
          .tied = false,
          .intermediate_size = swiglu_width,
          .layers = [](const ModelConfig& c) { return llama_layers(c, plan::HasBias::no); },
          .read = read_llama,
          .write = write_llama,
          .buffers = {".rotary_emb.inv_freq"},
          .loss =
              [](plan::Layers& layers, const ModelConfig& c, const LanguageModelStep& step) {
                return llama_loss(layers, c, step, plan::HasBias::no);
              }};
}

}  // namespace lockstep::models
