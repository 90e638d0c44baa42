// The description of Llama that needs no LibTorch, and the parts of it that its descendants share.
#pragma once

#include <lockstep/models/spec/family.h>

namespace lockstep::models {

Family llama();

// Llama, with or without biases of queries, keys and values.
std::vector<Layer> llama_layers(const ModelConfig& config, plan::HasBias qkv_bias);
plan::Tape::Value llama_loss(plan::Layers& layers, const ModelConfig& config,
                             const LanguageModelStep& step, plan::HasBias qkv_bias);

// The MLP has three weights where GPT-2's has two, so 8/3 of the width gives as many parameters.
// Rounded up to a multiple of 64.
std::int64_t swiglu_width(std::int64_t hidden_size);

}  // namespace lockstep::models
