// How Hugging Face's folders write a model down: config.json, and the names of the tensors. Our
// parameters have the names that its files have, so little is left to say about those.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

#include <lockstep/models/spec/config.h>

namespace lockstep::models {

// The keys of a config.json, each read with its type checked: UsageError names the file, the key
// and its value. A key that is null counts as left out. Ownership: refers to the object.
class ConfigKeys {
 public:
  ConfigKeys(const nlohmann::json& object, std::string file)
      : object_(object), file_(std::move(file)) {}

  const nlohmann::json* find(const char* key) const;  // null where it is left out
  std::int64_t whole(const char* key, std::int64_t fallback) const;
  double number(const char* key, double fallback) const;
  bool flag(const char* key, bool fallback) const;
  std::string text(const char* key, const char* fallback) const;
  // Refuses values of a setting that are not supported.
  void need(const char* key, bool supported) const;
  void need(const char* key, double supported) const;
  [[noreturn]] void refuse(const char* key, const std::string& why) const;

  const std::string& file() const { return file_; }

 private:
  const nlohmann::json& object_;
  std::string file_;
};

// Read and write the keys that most families after Llama use for a decoder with rotary positions,
// RMSNorm and SwiGLU; for their Family::read and write. `by_default` has the values that the
// transformers library takes for keys that are left out.
ModelConfig read_decoder_keys(const ConfigKeys& keys, const ModelConfig& by_default);
void write_decoder_keys(const ModelConfig& config, nlohmann::ordered_json& object);

// Reads a config.json. Keys that are left out have the values that the transformers library gives
// them. `file` is what messages call the text. UsageError, with the key and its value, for a text
// that is no config.json, and for models that we would compute otherwise: scaled rotary positions,
// other activations, biases, quantised weights.
//
// Dropout belongs to a training and not to the weights: it is not read, and is 0.
ModelConfig from_hugging_face(std::string_view json, std::string_view file);

// The text of a config.json that the transformers library reads. Checks first.
std::string to_hugging_face(const ModelConfig& config);

// The parameter of ours that a tensor of a file is, or nothing where the file has it for other
// reasons: masks, tables, a tied output layer. Files of models without their output layer leave out
// the first word of each name ("h.0.ln_1.bias" for "transformer.h.0.ln_1.bias").
std::optional<std::string> parameter_of(const ModelConfig& config, std::string_view file_name);

// The name that our files give a parameter, which is that of transformers for whole models.
std::string file_name_of(std::string_view parameter);

// Whether the file has the transpose of ours, as it has of GPT-2's linear layers.
bool stored_transposed(const ModelConfig& config, std::string_view parameter);

}  // namespace lockstep::models
