// A model that reads tokens and scores the next ones.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/models/key_value_cache.h>
#include <lockstep/models/model_axes.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/layers/dropout.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

namespace lockstep::models {

// A torch::nn::Module like any other. Its parameters have Hugging Face's names, and until spread()
// is called it knows nothing of ranks. The initial weights are a function of the seed and their
// names. wrap_activation_checkpointing() and SelectiveGradientCheckpointing can recompute its
// blocks.
//
// Tokens are [batch, length] of int64, below the vocabulary's size. Threading: as torch::nn, one
// forward pass at a time. Failure: UsageError for tokens of another shape or type, and for more
// tokens than the model has positions.
class LanguageModel : public torch::nn::Module {
 public:
  // The config with every default filled in.
  const ModelConfig& config() const { return config_; }

  // Reduces the layers to this rank's part and, from now on, computes this rank's part of
  // sequences. All ranks of the axes still pass whole sequences. Results are of the positions that
  // this rank has between layers; losses are of those that it attends from. Call it once, before
  // the model's parameters are used otherwise, on every rank of the axes with the same weights.
  // UsageError, with the numbers, for a model that cannot be cut this way.
  void spread(const ModelAxes& axes);
  const ModelAxes& axes() const { return *axes_; }

  // Keeps the parts of the model that pipeline stages with these layers need, and frees the rest.
  // The parts are the blocks, the embeddings if the first layer is among them, and the last norm
  // and the output layer if the last one is. Call it once, after spread(). UsageError for layers
  // that the model does not have.
  void keep_layers(const std::vector<mesh::Interval>& layers);

  // The hidden state of each token after the last norm: [batch, length, hidden].
  at::Tensor hidden(const at::Tensor& tokens);
  // One stage's part of hidden(). `x` is the output of the layers before these; it is undefined if
  // these begin with the first layer.
  at::Tensor run_layers(mesh::Interval layers, const at::Tensor& tokens, const at::Tensor& x);
  // The same for tokens that follow those in the cache, which grows by them. Not for training.
  at::Tensor extend(const at::Tensor& tokens, KeyValueCache& cache);

  // The scores of each next token: [batch, length, vocab].
  at::Tensor logits(const at::Tensor& tokens);
  at::Tensor logits_of(const at::Tensor& hidden) const;

  // The cross-entropy of targets [batch, length], summed over those that are not -100, and their
  // number: divide by that number, summed over all ranks and micro-batches.
  nn::LossSum loss(const at::Tensor& tokens, const nn::Targets& targets);
  nn::LossSum loss_of(const at::Tensor& hidden, const nn::Targets& targets) const;

  // The weight that is both embedding and output layer, if the model ties them and these layers
  // include one of the two; undefined otherwise.
  at::Tensor tied_weight() const;

  // Call it before each forward pass of a training with dropout, with the step and the place of
  // each sample of this batch in the step's batch of all ranks and micro-batches.
  void set_random_position(std::uint64_t step, std::vector<std::int64_t> rows);

 protected:
  LanguageModel(const ModelConfig& config, std::uint64_t seed);

  const std::shared_ptr<const nn::RandomState>& random_state() const { return random_reader_; }
  const std::shared_ptr<const ModelAxes>& axes_state() const { return axes_reader_; }
  // The ends of the model that a part of it has.
  struct Ends {
    bool embeddings = true;
    bool output = true;
  };
  // Unregisters a module and frees its parameters.
  static void drop_module(torch::nn::Module& owner, const std::string& name);

  // Empty at first; the family's constructor fills and registers it. A block that is recomputed
  // uses the random position that it had in forward.
  const BlockList& blocks() const { return blocks_; }

 private:
  // Embeds the tokens that this rank attends from.
  virtual at::Tensor embed(const at::Tensor& tokens, const ModelAxes::Positions& positions) = 0;
  // `cache` may be null.
  virtual at::Tensor run_block(std::size_t block, const at::Tensor& x,
                               const ModelAxes::Positions& positions, KeyValueCache* cache) = 0;
  virtual at::Tensor last_norm(const at::Tensor& x) = 0;
  // Frees the modules at the ends of the model that are not in `kept`. The output layer may be the
  // embedding.
  virtual void drop(Ends kept) = 0;
  virtual const at::Tensor& output_weight() const = 0;  // [vocab, hidden]

  at::Tensor run(mesh::Interval layers, const at::Tensor& tokens, at::Tensor x,
                 const ModelAxes::Positions& positions, KeyValueCache* cache);
  void check_layers(mesh::Interval layers) const;
  void check_tokens(const at::Tensor& tokens, std::int64_t first) const;

  ModelConfig config_;
  std::shared_ptr<nn::RandomState> random_;
  std::shared_ptr<const nn::RandomState> random_reader_;  // the same
  std::shared_ptr<ModelAxes> axes_ = std::make_shared<ModelAxes>();
  std::shared_ptr<const ModelAxes> axes_reader_ = axes_;  // the same
  BlockList blocks_;
};

}  // namespace lockstep::models
