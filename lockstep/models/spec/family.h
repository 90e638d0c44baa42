// A family of models without LibTorch: what planners, launchers and checkpoints know of it. A new
// one is a folder beside models/gpt2 and a row in registry.cpp, or one of a program of one's own
// (models/make_model.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <lockstep/models/spec/config.h>
#include <lockstep/models/spec/hugging_face.h>
#include <lockstep/models/spec/training_step.h>
#include <lockstep/plan/layers.h>

namespace lockstep::models {

// One layer of a model: its parameters, how they begin, how ranks of a tensor axis share them. The
// list of layers determines a model's number of parameters, their shapes and names.
struct Layer {
  enum class Kind : std::uint8_t {
    embedding,  // a weight of [out, in], whose rows are looked up
    linear,     // a weight of [out, in] that is multiplied
    norm,       // a weight of [out], which begins with ones
  };
  enum class Cut : std::uint8_t {
    whole,       // every rank has all of it
    columns,     // outputs, in units of `unit`, of each of `parts` parts (nn::LayerCut)
    rows,        // inputs; a bias stays whole
    vocabulary,  // rows, in parts that may differ by one
  };

  // The name in transformers; "*" stands for the number of a block: "model.layers.*.mlp.up_proj".
  // Files of models without an output layer leave out the word before the first dot.
  std::string name;
  Kind kind = Kind::linear;
  std::int64_t out = 0;
  std::int64_t in = 0;
  bool has_bias = false;  // of [out], which begins with zeros
  Cut cut = Cut::whole;
  std::int64_t parts = 1;  // 3 where one product gives queries, keys and values
  std::int64_t unit = 1;   // the width of a head
  double initial_std = 0.02;
  bool stored_transposed = false;  // in Hugging Face's files

  bool in_block() const { return name.find('*') != std::string::npos; }
};

struct Family {
  std::string name;        // in a config, and in Hugging Face's model_type: "gpt2"
  std::string title;       // in reports: "GPT"
  std::string about = {};  // in docs/config.md, after the name

  bool rotary = false;           // positions are rotary: rope_theta counts, heads have even widths
  bool grouped_queries = false;  // num_kv_heads may be less than num_heads
  bool tied = true;              // tie_embeddings, where a config does not say
  // The inner width of the MLP, where a config does not give it.
  std::function<std::int64_t(std::int64_t hidden_size)> intermediate_size;

  // Checks what this family asks of a config beyond the common checks: UsageError, with the
  // numbers. Every default is filled in. May be empty.
  std::function<void(const ModelConfig&)> check = {};

  // In the model's order, embeddings first; the output layer, where it is not the embedding, is
  // added to them as "lm_head".
  std::function<std::vector<Layer>(const ModelConfig&)> layers;

  // Read and write a config.json of Hugging Face's, beside the keys that all families have
  // (model_type, vocab_size, tie_word_embeddings). UsageError for a model that would be computed
  // otherwise here.
  std::function<ModelConfig(const ConfigKeys&)> read;
  std::function<void(const ModelConfig&, nlohmann::ordered_json& object)> write;
  // Ends of names of tensors in Hugging Face's files that are no parameters: masks, tables.
  std::vector<std::string> buffers = {};

  // Computes the loss of a step on a tape, as the module does: the memory of a step follows from
  // it. It registers layers in the order of the module's parameters.
  std::function<plan::Tape::Value(plan::Layers&, const ModelConfig&, const LanguageModelStep&)>
      loss;
};

// The family of this name, which lives as long as the program. UsageError that lists all families
// where there is none of that name.
const Family& family_named(std::string_view name);
// All names: our families first, then those that were added, in that order.
std::vector<std::string> family_names();
// `"gpt2" or "llama"`: the families for which `holds` is true, for messages.
std::string families_that(const std::function<bool(const Family&)>& holds);

// Called by register_family() of models/make_model.h, which programs use. UsageError where the name
// is taken, or something is missing. Any thread.
void add_family(Family family);

// The layers of such a model, the output layer among them. Checks nothing.
std::vector<Layer> layers_of(const ModelConfig& config);
// The layer that has this parameter; nothing where none has.
std::optional<Layer> layer_of(const ModelConfig& config, std::string_view parameter);

}  // namespace lockstep::models
