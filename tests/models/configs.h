// Small models for tests; their sizes differ wherever they may.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/models/spec/config.h>

namespace lockstep::models {

inline ModelConfig small_gpt() {
  return {.family = "gpt2",
          .vocab_size = 37,
          .hidden_size = 24,
          .num_layers = 3,
          .num_heads = 4,
          .intermediate_size = 50,
          .max_positions = 20};
}

inline ModelConfig small_llama() {
  return {.family = "llama",
          .vocab_size = 37,
          .hidden_size = 24,
          .num_layers = 3,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 10,
          .intermediate_size = 50,
          .max_positions = 20,
          .tie_embeddings = false};
}

inline ModelConfig small_qwen2() {
  ModelConfig config = small_llama();
  config.family = "qwen2";
  config.tie_embeddings = true;
  return config;
}

// One of each family.
inline std::vector<ModelConfig> small_models() {
  return {small_gpt(), small_llama(), small_qwen2()};
}

// Names the parameters of INSTANTIATE_TEST_SUITE_P, and prints them if a test fails.
inline std::string family_of(const ModelConfig& config) { return config.family; }
inline void PrintTo(const ModelConfig& config, std::ostream* out) { *out << family_of(config); }

// [batch, length]
inline at::Tensor some_tokens(const ModelConfig& config, std::int64_t batch, std::int64_t length) {
  return (at::arange(batch * length, at::kLong) * 7 + 3)
      .remainder(config.vocab_size)
      .view({batch, length});
}

}  // namespace lockstep::models
