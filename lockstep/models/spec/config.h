// The sizes and settings of a language model. No LibTorch: planners and launchers read them too.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lockstep::models {

// Which GELU a GPT-2 has between the two layers of its MLP.
enum class Activation { gelu_tanh, gelu_erf };

// The sizes have no defaults: a model of none is refused. Fields that say "0: …" may be left out.
struct ModelConfig {
  std::string family = "gpt2";  // a Family's name (models/spec/family.h)
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t num_layers = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;       // 0: num_heads; fewer are grouped queries
  std::int64_t head_dim = 0;           // 0: hidden_size / num_heads
  std::int64_t intermediate_size = 0;  // 0: the family's
  std::int64_t max_positions = 1024;   // the longest text it can see
  double norm_eps = 1e-5;
  double rope_theta = 10000.0;                    // of rotary positions
  Activation activation = Activation::gelu_tanh;  // GPT-2
  bool tie_embeddings = true;                     // the output layer is the embedding's weight
  double dropout = 0.0;                           // of embeddings and of each residual branch

  bool operator==(const ModelConfig&) const = default;
};

// UsageError, with the numbers, where no such model can be made.
void check(const ModelConfig& config);

// The same with the fields filled in that are 0 for a default. Checks first.
ModelConfig resolved(const ModelConfig& config);

// UsageError, with the numbers, where `num_ranks` ranks of a tensor axis cannot share the layers of
// such a model. Where there are fewer key-value heads than ranks, several ranks hold each.
void check_tensor_ranks(const ModelConfig& config, std::int64_t num_ranks);

// How many numbers a model learns. Checks first; what passes cannot overflow.
std::int64_t num_parameters(const ModelConfig& config);

// Floating-point operations of forward and backward for one token, in sequences of this length: six
// for each weight that is multiplied (so not the embeddings), and the products of attention with
// the half of the positions that a token sees on average. Recomputation does not count, as is usual
// for the share of a GPU's peak (MFU).
double training_flops_per_token(const ModelConfig& config, std::int64_t sequence_length);

// Every parameter of such a model by its name, which is that of the transformers library, and its
// shape. Checks first.
std::map<std::string, std::vector<std::int64_t>> parameter_shapes(const ModelConfig& config);

// The share of a model that one rank holds: some of its layers, and its part of each of them.
struct ModelShare {
  std::int64_t num_layers = 0;
  bool has_embedding = false;  // of tokens, and of positions where there is one
  bool has_head = false;       // the last norm and the output layer
  std::int64_t tensor_rank = 0;
  std::int64_t tensor_ranks = 1;
};

// The same for a rank's share. An embedding whose weight is also the head's counts once where the
// rank has both.
std::int64_t num_parameters(const ModelConfig& config, const ModelShare& share);

}  // namespace lockstep::models
