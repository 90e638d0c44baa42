// The description of the family that needs no LibTorch.
#include <utility>

#include <nlohmann/json.hpp>

#include <lockstep/models/spec/family.h>

#include "token_mlp.h"

namespace {

using namespace lockstep;
using models::Layer;
using models::ModelConfig;
using plan::Tape;

std::vector<Layer> layers_of_token_mlp(const ModelConfig& config) {
  using Kind = Layer::Kind;
  using Cut = Layer::Cut;
  const std::int64_t width = config.hidden_size, inside = config.intermediate_size;
  return {
      {.name = "words",
       .kind = Kind::embedding,
       .out = config.vocab_size,
       .in = width,
       .cut = Cut::vocabulary},
      {.name = "blocks.*.norm", .kind = Kind::norm, .out = width},
      {.name = "blocks.*.up", .out = inside, .in = width, .has_bias = true, .cut = Cut::columns},
      {.name = "blocks.*.down", .out = width, .in = inside, .has_bias = true, .cut = Cut::rows},
      {.name = "norm", .kind = Kind::norm, .out = width}};
}

// Describes the same computation as the module.
class TapeBlockOfTokenMlp {
 public:
  TapeBlockOfTokenMlp(plan::Layers& layers, const ModelConfig& config)
      : layers_(layers),
        norm_(layers.rms_norm(config.hidden_size)),
        up_(layers.linear(config.hidden_size, config.intermediate_size, plan::HasBias::yes)),
        down_(layers.linear(config.intermediate_size, config.hidden_size, plan::HasBias::yes)) {}

  Tape::Value operator()(const Tape::Value& x) const {
    const Tape::Value inside = layers_.gelu(layers_.apply(up_, layers_.apply(norm_, x)));
    return layers_.tape().add(x, layers_.apply(down_, inside));
  }

 private:
  plan::Layers& layers_;
  plan::Norm norm_;
  plan::Linear up_, down_;
};

Tape::Value loss_of_token_mlp(plan::Layers& layers, const ModelConfig& config,
                              const models::LanguageModelStep& step) {
  const plan::Embedding words = layers.embedding(config.vocab_size, config.hidden_size);
  const auto blocks = models::tape_blocks(layers, config.num_layers, [&]() -> models::TapeBlock {
    return TapeBlockOfTokenMlp(layers, config);
  });
  const plan::Norm norm = layers.rms_norm(config.hidden_size);
  const plan::Embedding head =
      config.tie_embeddings ? words : layers.embedding(config.vocab_size, config.hidden_size);
  Tape::Value x = layers.look_up(words, layers.num_tokens());
  x = models::through_blocks(layers, blocks, std::move(x), step.recomputed_blocks);
  const Tape::Value hidden = layers.apply(norm, std::exchange(x, {}));
  return layers.linear_cross_entropy(hidden, head);
}

}  // namespace

models::Family token_mlp_family() {
  return {.name = "token-mlp",
          .title = "Token MLP",
          .about = "one token at a time",
          .tied = false,
          .intermediate_size = [](std::int64_t width) { return 2 * width; },
          .layers = layers_of_token_mlp,
          .read =
              [](const models::ConfigKeys& keys) {
                return models::read_decoder_keys(keys, {.tie_embeddings = false});
              },
          .write = models::write_decoder_keys,
          .loss = loss_of_token_mlp};
}
