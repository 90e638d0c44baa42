// Llama without LibTorch, and what its descendants take of it.
#pragma once

#include <lockstep/models/spec/family.h>

namespace lockstep::models {

Family llama();

// The same model with biases of queries, keys and values, or without any.
std::vector<Layer> llama_layers(const ModelConfig& config, plan::HasBias qkv_bias);
plan::Tape::Value llama_loss(plan::Layers& layers, const ModelConfig& config,
                             const LanguageModelStep& step, plan::HasBias qkv_bias);

// Three weights in the MLP where GPT-2 has two: 8/3 of the width makes them as many. The next
// multiple of 64.
std::int64_t swiglu_width(std::int64_t hidden_size);

}  // namespace lockstep::models
