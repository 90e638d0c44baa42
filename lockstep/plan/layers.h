// The layers of language models on a Tape: what each keeps for backward, and needs while it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/plan/model_sizes.h>
#include <lockstep/plan/tape.h>

namespace lockstep::plan {

struct Linear {
  std::int64_t in = 0;
  std::int64_t out = 0;
  std::vector<std::size_t> parameters;  // the weight, then the bias where there is one
};
struct Norm {
  enum class Kind : std::uint8_t { layer, rms } kind = Kind::layer;
  std::vector<std::size_t> parameters;
};
struct Embedding {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::size_t weight = 0;
};

enum class HasBias : std::uint8_t { no, yes };

// The kernels that run: lockstep::nn's own for floats on the CPU, its own for a GPU, or LibTorch's
// for everything else.
enum class Kernels : std::uint8_t { cpu, gpu, libtorch };

// The kernels that run, and their number of tokens.
struct LayerTerms {
  std::int64_t num_tokens = 0;
  std::int64_t element_bytes = 4;
  Kernels kernels = Kernels::cpu;
};

// Each function does to the Tape what the module or function of the same name does to memory.
// Tensors are [tokens, width].
class Layers {
 public:
  explicit Layers(const LayerTerms& terms) : terms_(terms) {}

  Tape& tape() { return tape_; }
  std::int64_t num_tokens() const { return terms_.num_tokens; }

  // Parameters are in this block of the model until the next call.
  void begin_block(std::size_t block) { block_ = block; }
  void end_blocks() { block_.reset(); }
  ModelSizes sizes() const { return sizes_of_blocks(parameters_); }

  Linear linear(std::int64_t in, std::int64_t out, HasBias bias = HasBias::no);
  Norm layer_norm(std::int64_t width);
  Norm rms_norm(std::int64_t width);
  Embedding embedding(std::int64_t rows, std::int64_t width);

  Tape::Value apply(const Linear& layer, const Tape::Value& x);
  Tape::Value apply(const Norm& layer, const Tape::Value& x);
  Tape::Value look_up(const Embedding& layer, std::int64_t num_tokens);
  Tape::Value attention(const Tape::Value& q, const Tape::Value& k, const Tape::Value& v,
                        std::int64_t num_heads);
  Tape::Value rotary(const Tape::Value& x);
  Tape::Value gelu(const Tape::Value& x);
  Tape::Value silu_multiply(const Tape::Value& gate, const Tape::Value& up);
  Tape::Value dropout(const Tape::Value& x, double p);
  Tape::Value linear_cross_entropy(const Tape::Value& hidden, const Embedding& head);

 private:
  std::size_t parameter(std::int64_t num_elements, std::int64_t matrix_rows = 0);
  Tape::Value rms_of_operators(const Norm& layer, const Tape::Value& x);
  std::int64_t logits_at_once(std::int64_t vocabulary) const;
  Tape::Value to_type(const Tape::Value& x, std::int64_t element_bytes);

  LayerTerms terms_;
  Tape tape_;
  std::optional<std::size_t> block_;
  std::vector<PlacedParameter> parameters_;
};

}  // namespace lockstep::plan
