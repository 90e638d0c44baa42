// How Hugging Face's folders write a model down: config.json, and the names of the tensors. Our
// parameters have the names that its files have, so little is left to say about those.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <lockstep/models/config.h>

namespace lockstep::models {

// What a config.json says. Keys that are left out have the values that the transformers library
// gives them. `file` is what messages call the text. UsageError, with the key and its value, for
// what is no config.json, and for models that we would compute otherwise: scaled rotary positions,
// other activations, biases, quantised weights.
//
// Dropout is no property of the weights but of a training: it is not read, and is 0.
ModelConfig from_hugging_face(std::string_view json, std::string_view file);

// The text of a config.json that the transformers library reads. Checks first.
std::string to_hugging_face(const ModelConfig& config);

// The parameter of ours that a tensor of a file is, or nothing where the file has it for other
// reasons: masks, tables, a tied output layer. Files of models without their output layer leave out
// the first word of each name ("h.0.ln_1.bias" for "transformer.h.0.ln_1.bias").
std::optional<std::string> parameter_of(const ModelConfig& config, std::string_view file_name);

// What a file of ours calls a parameter: as transformers does for whole models.
std::string file_name_of(std::string_view parameter);

// Whether the file has the transpose of ours: GPT-2's layers but for embeddings are [in, out].
bool stored_transposed(const ModelConfig& config, std::string_view parameter);

}  // namespace lockstep::models
