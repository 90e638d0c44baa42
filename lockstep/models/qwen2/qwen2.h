// Qwen2 (Yang et al., 2024) is Llama with biases of queries, keys and values. Its parameters have
// Hugging Face's names.
#pragma once

#include <cstdint>

#include <lockstep/models/llama/llama.h>

namespace lockstep::models {

class Qwen2 : public Llama {
 public:
  Qwen2(const ModelConfig& config, std::uint64_t seed) : Llama(config, seed, nn::Bias::added) {}
};

}  // namespace lockstep::models
