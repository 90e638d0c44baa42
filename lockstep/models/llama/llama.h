// Llama (Touvron et al., 2023), with the names that Hugging Face gives its parameters.
#pragma once

#include <cstdint>
#include <memory>

#include <lockstep/models/language_model.h>
#include <lockstep/nn/tensor_parallel/linear.h>

namespace lockstep::models {

class Llama : public LanguageModel {
 public:
  // `qkv_bias` says whether queries, keys and values have biases, as in some descendants of Llama.
  Llama(const ModelConfig& config, std::uint64_t seed, nn::Bias qkv_bias = nn::Bias::none);

 private:
  class Decoder;

  at::Tensor embed(const at::Tensor& tokens, const ModelAxes::Positions& positions) override;
  at::Tensor run_block(std::size_t block, const at::Tensor& x,
                       const ModelAxes::Positions& positions, KeyValueCache* cache) override;
  at::Tensor last_norm(const at::Tensor& x) override;
  void drop(Ends kept) override;
  const at::Tensor& output_weight() const override;

  std::shared_ptr<Decoder> model_;
  nn::Linear lm_head_{nullptr};  // empty if the output layer is the embedding
};

}  // namespace lockstep::models
