#include <lockstep/models/qwen2/spec/spec.h>

#include <nlohmann/json.hpp>

#include <lockstep/models/llama/spec/spec.h>
#include <lockstep/models/spec/training_step.h>

namespace lockstep::models {

namespace {

ModelConfig read_qwen2(const ConfigKeys& keys) {
  // With a sliding window, attention would see the last tokens only. The keys that give the
  // window's size matter only if this is on.
  keys.need("use_sliding_window", false);
  return read_decoder_keys(keys, {.vocab_size = 151936,
                                  .hidden_size = 4096,
                                  .num_layers = 32,
                                  .num_heads = 32,
                                  .num_kv_heads = 32,
                                  .intermediate_size = 22016,
                                  .max_positions = 32768,
                                  .norm_eps = 1e-6,
                                  .tie_embeddings = false});
}

void write_qwen2(const ModelConfig& config, nlohmann::ordered_json& object) {
  object["architectures"] = {"Qwen2ForCausalLM"};
  write_decoder_keys(config, object);
  object["use_sliding_window"] = false;
}

}  // namespace

Family qwen2() {
  return {.name = "qwen2",
          .title = "Qwen2",
          .about = "Llama with biases of queries, keys and values",
          .rotary = true,
          .grouped_queries = true,
          .tied = false,
          .intermediate_size = swiglu_width,
          .layers = [](const ModelConfig& c) { return llama_layers(c, plan::HasBias::yes); },
          .read = read_qwen2,
          .write = write_qwen2,
          .buffers = {".rotary_emb.inv_freq"},
          .loss =
              [](plan::Layers& layers, const ModelConfig& c, const LanguageModelStep& step) {
                return llama_loss(layers, c, step, plan::HasBias::yes);
              }};
}

}  // namespace lockstep::models
