#include <lockstep/models/gpt2/spec/spec.h>

#include <cmath>
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/base/error.h>
#include <lockstep/models/spec/training_step.h>

namespace lockstep::models {

namespace {

using plan::Tape;

void check_gpt(const ModelConfig& config) {
  if (config.head_dim * config.num_heads != config.hidden_size)
    throw UsageError("head_dim {} × num_heads {} is not hidden_size {}, as GPT-2 needs it",
                     config.head_dim, config.num_heads, config.hidden_size);
}

std::vector<Layer> gpt_layers(const ModelConfig& config) {
  using Kind = Layer::Kind;
  using Cut = Layer::Cut;
  const std::int64_t hidden = config.hidden_size, inside = config.intermediate_size;
  // Layers that add to the residual stream begin with smaller weights, which keeps the stream's
  // size from growing with depth.
  const double to_stream = 0.02 / std::sqrt(2.0 * static_cast<double>(config.num_layers));
  const auto norm = [&](const char* name) {
    return Layer{.name = name, .kind = Kind::norm, .out = hidden, .has_bias = true};
  };
  return {{.name = "transformer.wte",
           .kind = Kind::embedding,
           .out = config.vocab_size,
           .in = hidden,
           .cut = Cut::vocabulary},
          {.name = "transformer.wpe",
           .kind = Kind::embedding,
           .out = config.max_positions,
           .in = hidden},
          norm("transformer.h.*.ln_1"),
          {.name = "transformer.h.*.attn.c_attn",
           .out = 3 * hidden,
           .in = hidden,
           .has_bias = true,
           .cut = Cut::columns,
           .parts = 3,
           .unit = config.head_dim,
           .stored_transposed = true},
          {.name = "transformer.h.*.attn.c_proj",
           .out = hidden,
           .in = hidden,
           .has_bias = true,
           .cut = Cut::rows,
           .initial_std = to_stream,
           .stored_transposed = true},
          norm("transformer.h.*.ln_2"),
          {.name = "transformer.h.*.mlp.c_fc",
           .out = inside,
           .in = hidden,
           .has_bias = true,
           .cut = Cut::columns,
           .stored_transposed = true},
          {.name = "transformer.h.*.mlp.c_proj",
           .out = hidden,
           .in = inside,
           .has_bias = true,
           .cut = Cut::rows,
           .initial_std = to_stream,
           .stored_transposed = true},
          norm("transformer.ln_f")};
}

Activation read_activation(const ConfigKeys& keys) {
  const std::string name = keys.text("activation_function", "gelu_new");
  if (name == "gelu_new" || name == "gelu_pytorch_tanh") return Activation::gelu_tanh;
  if (name != "gelu")
    keys.refuse("activation_function", "gelu_new, gelu_pytorch_tanh and gelu are supported");
  return Activation::gelu_erf;
}

ModelConfig read_gpt(const ConfigKeys& keys) {
  keys.need("scale_attn_weights", true);
  keys.need("scale_attn_by_inverse_layer_idx", false);
  keys.need("add_cross_attention", false);
  return {.vocab_size = keys.whole("vocab_size", 50257),
          .hidden_size = keys.whole("n_embd", 768),
          .num_layers = keys.whole("n_layer", 12),
          .num_heads = keys.whole("n_head", 12),
          .intermediate_size = keys.whole("n_inner", 0),
          .max_positions = keys.whole("n_positions", 1024),
          .norm_eps = keys.number("layer_norm_epsilon", 1e-5),
          .activation = read_activation(keys),
          .tie_embeddings = keys.flag("tie_word_embeddings", true)};
}

void write_gpt(const ModelConfig& config, nlohmann::ordered_json& object) {
  object.update(
      {{"architectures", {"GPT2LMHeadModel"}},
       {"n_embd", config.hidden_size},
       {"n_layer", config.num_layers},
       {"n_head", config.num_heads},
       {"n_inner", config.intermediate_size},
       {"n_positions", config.max_positions},
       {"activation_function", config.activation == Activation::gelu_tanh ? "gelu_new" : "gelu"},
       {"layer_norm_epsilon", config.norm_eps},
       {"embd_pdrop", config.dropout},
       {"resid_pdrop", config.dropout},
       {"attn_pdrop", 0.0}});
}

// These mirror the modules in gpt2/gpt.cpp: they register parameters in the same order, and run the
// same forward.
class GptTapeBlock {
 public:
  GptTapeBlock(plan::Layers& layers, const ModelConfig& config)
      : layers_(layers),
        config_(config),
        ln_1_(layers.layer_norm(config.hidden_size)),
        c_attn_(layers.linear(config.hidden_size, 3 * config.hidden_size, plan::HasBias::yes)),
        c_proj_(layers.linear(config.hidden_size, config.hidden_size, plan::HasBias::yes)),
        ln_2_(layers.layer_norm(config.hidden_size)),
        c_fc_(layers.linear(config.hidden_size, config.intermediate_size, plan::HasBias::yes)),
        mlp_proj_(layers.linear(config.intermediate_size, config.hidden_size, plan::HasBias::yes)) {
  }

  Tape::Value operator()(const Tape::Value& x) const {
    const Tape::Value y = layers_.tape().add(x, attention(layers_.apply(ln_1_, x)));
    return layers_.tape().add(y, mlp(layers_.apply(ln_2_, y)));
  }

 private:
  Tape::Value attention(const Tape::Value& x) const {
    const Tape::Value projected = layers_.apply(c_attn_, x);
    const std::int64_t part = projected.bytes / 3;
    const auto qkv = layers_.tape().split(projected, {part, part, part});
    const Tape::Value y = layers_.attention(qkv[0], qkv[1], qkv[2], config_.num_heads);
    return layers_.dropout(layers_.apply(c_proj_, y), config_.dropout);
  }
  Tape::Value mlp(const Tape::Value& x) const {
    return layers_.dropout(layers_.apply(mlp_proj_, layers_.gelu(layers_.apply(c_fc_, x))),
                           config_.dropout);
  }

  plan::Layers& layers_;
  const ModelConfig& config_;
  plan::Norm ln_1_;
  plan::Linear c_attn_, c_proj_;
  plan::Norm ln_2_;
  plan::Linear c_fc_, mlp_proj_;
};

Tape::Value embedded(plan::Layers& layers, const plan::Embedding& wte, const plan::Embedding& wpe,
                     const ModelConfig& config, const LanguageModelStep& step) {
  const Tape::Value words = layers.look_up(wte, layers.num_tokens());
  const Tape::Value places = layers.look_up(wpe, step.sequence_length);
  return layers.dropout(layers.tape().add(words, places), config.dropout);
}

Tape::Value gpt_loss(plan::Layers& layers, const ModelConfig& config,
                     const LanguageModelStep& step) {
  const plan::Embedding wte = layers.embedding(config.vocab_size, config.hidden_size);
  const plan::Embedding wpe = layers.embedding(config.max_positions, config.hidden_size);
  const auto blocks = tape_blocks(layers, config.num_layers,
                                  [&]() -> TapeBlock { return GptTapeBlock(layers, config); });
  const plan::Norm ln_f = layers.layer_norm(config.hidden_size);
  const plan::Embedding head =
      config.tie_embeddings ? wte : layers.embedding(config.vocab_size, config.hidden_size);
  Tape::Value x = embedded(layers, wte, wpe, config, step);
  x = through_blocks(layers, blocks, std::move(x), step.recomputed_blocks);
  const Tape::Value hidden = layers.apply(ln_f, std::exchange(x, {}));
  return layers.linear_cross_entropy(hidden, head);
}

}  // namespace

Family gpt2() {
  return {.name = "gpt2",
          .title = "GPT",
          .about = "learned positions, LayerNorm, GELU; 4 × width inside the MLP, tied embeddings",
          .rotary = false,
          .grouped_queries = false,
          .tied = true,
          .intermediate_size = [](std::int64_t hidden) { return 4 * hidden; },
          .check = check_gpt,
          .layers = gpt_layers,
          .read = read_gpt,
          .write = write_gpt,
          .buffers = {".attn.bias", ".attn.masked_bias"},
          .loss = gpt_loss};
}

}  // namespace lockstep::models
