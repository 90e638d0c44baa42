#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr std::int64_t kLargestVocabulary = 1 << 24;
constexpr std::int64_t kLargestWidth = 1 << 20;
constexpr std::int64_t kMostLayers = 1 << 16;

// Llama's: two thirds of four times the width, up to the next multiple of 64.
std::int64_t default_intermediate_size(ModelFamily family, std::int64_t hidden_size) {
  if (family == ModelFamily::gpt2) return 4 * hidden_size;
  return (8 * hidden_size / 3 + 63) / 64 * 64;
}

void check_heads(JsonSection& section, const ModelSection& model) {
  if (model.hidden_size == 0 || model.num_heads == 0) return;
  if (model.hidden_size % model.num_heads != 0) {
    const std::int64_t below = model.hidden_size / model.num_heads * model.num_heads;
    const std::string near = below == 0 ? "" : fmt::format("{} or ", below);
    section.mistake("hidden_size",
                    fmt::format("is {}, which {} heads do not divide: make it "
                                "{}{}, or change model.num_heads",
                                model.hidden_size, model.num_heads, near, below + model.num_heads));
  } else if (const std::int64_t width = model.hidden_size / model.num_heads;
             section.sound({"family"}) && model.family == ModelFamily::llama && width % 2 != 0) {
    section.mistake("num_heads", fmt::format("is {}, which leaves each head {} of the {} "
                                             "dimensions: rotary positions need an even number",
                                             model.num_heads, width, model.hidden_size));
  }
  if (model.num_heads % model.num_kv_heads != 0)
    section.mistake("num_kv_heads",
                    fmt::format("is {}, which does not divide the {} heads of model.num_heads",
                                model.num_kv_heads, model.num_heads));
}

void check_family(JsonSection& section, const ModelSection& model) {
  if (!section.sound({"family"}) || model.family != ModelFamily::gpt2) return;
  if (section.find("num_kv_heads") != nullptr && model.num_kv_heads != model.num_heads &&
      section.sound({"num_heads", "num_kv_heads"}))
    section.mistake("num_kv_heads",
                    fmt::format("is {}, but GPT-2 has as many as heads, {}: remove it, or make "
                                "model.family \"llama\"",
                                model.num_kv_heads, model.num_heads));
  if (section.find("rope_theta") != nullptr)
    section.mistake("rope_theta", "is a key of the family \"llama\": GPT-2 learns its positions");
}

void read_from(JsonSection& section) {
  for (const std::string_view key :
       {"family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads",
        "intermediate_size", "max_positions", "dropout", "tie_embeddings", "norm_eps",
        "rope_theta"})
    if (section.find(key) != nullptr)
      section.mistake(key, "cannot stand beside model.from, whose folder says what the model is: "
                           "remove one of them");
}

}  // namespace

void read_model(JsonSection& top, const PathReader& paths, const DataSection& data,
                ModelSection& model) {
  JsonSection section = top.section("model");
  if (!section.present())
    top.missing("model", "say what is trained, for example \"model\": {\"family\": \"gpt2\", "
                         "\"hidden_size\": 384, \"num_layers\": 6, \"num_heads\": 6}");
  if (paths.read(section, "from", model.from)) return read_from(section);
  section.choice("family", model.family, kFamilies);
  section.integer("vocab_size", model.vocab_size, 1, kLargestVocabulary);
  if (!section.integer("hidden_size", model.hidden_size, 1, kLargestWidth))
    section.missing("hidden_size", "the width of the model, for example 384");
  if (!section.integer("num_layers", model.num_layers, 1, kMostLayers))
    section.missing("num_layers", "the number of transformer blocks, for example 6");
  if (!section.integer("num_heads", model.num_heads, 1, kLargestWidth))
    section.missing("num_heads", "the number of attention heads, for example 6");
  model.num_kv_heads = model.num_heads;
  section.integer("num_kv_heads", model.num_kv_heads, 1, kLargestWidth);
  model.intermediate_size = default_intermediate_size(model.family, model.hidden_size);
  section.integer("intermediate_size", model.intermediate_size, 1, 8 * kLargestWidth);
  model.max_positions = data.sequence_length;
  if (section.integer("max_positions", model.max_positions, 1, kMostTokens) &&
      model.max_positions < data.sequence_length)
    section.mistake("max_positions", fmt::format("is {}, less than data.sequence_length, which is "
                                                 "{}: make it at least that",
                                                 model.max_positions, data.sequence_length));
  section.number("dropout", model.dropout, {.lowest = 0, .highest = 1, .below_highest = true});
  model.tie_embeddings = model.family == ModelFamily::gpt2;
  section.boolean("tie_embeddings", model.tie_embeddings);
  section.number("norm_eps", model.norm_eps, {.lowest = 0, .highest = 1, .above_lowest = true});
  section.number("rope_theta", model.rope_theta, {.lowest = 1, .highest = 1e12});
  check_heads(section, model);
  check_family(section, model);
}

}  // namespace lockstep::train
