#include <lockstep/models/language_model.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>

namespace lockstep::models {

LanguageModel::LanguageModel(const ModelConfig& config, std::uint64_t seed)
    : config_(resolved(config)),
      random_(std::make_shared<nn::RandomState>(nn::RandomState{.seed = seed})),
      random_reader_(random_),
      blocks_(activations::Snapshot(
          [random = random_] { return [random, then = *random] { *random = then; }; })) {}

at::Tensor LanguageModel::hidden(const at::Tensor& tokens) {
  check_tokens(tokens, 0);
  return do_hidden(tokens, 0, nullptr);
}

at::Tensor LanguageModel::extend(const at::Tensor& tokens, KeyValueCache& cache) {
  const std::int64_t first = cache.length();
  check_tokens(tokens, first);
  return do_hidden(tokens, first, &cache);
}

at::Tensor LanguageModel::logits(const at::Tensor& tokens) { return logits_of(hidden(tokens)); }

at::Tensor LanguageModel::logits_of(const at::Tensor& hidden) const {
  return at::linear(hidden, output_weight());
}

nn::LossSum LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  if (targets.sizes() != tokens.sizes())
    throw UsageError("tokens {} and targets {} differ in shape: each token has one target",
                     c10::str(tokens.sizes()), c10::str(targets.sizes()));
  return nn::linear_cross_entropy(hidden(tokens).flatten(0, 1), output_weight(), targets.flatten());
}

void LanguageModel::set_random_position(std::uint64_t step, std::vector<std::int64_t> rows) {
  random_->step = step;
  random_->rows = std::move(rows);
}

void LanguageModel::check_tokens(const at::Tensor& tokens, std::int64_t first) const {
  if (tokens.dim() != 2 || tokens.scalar_type() != at::kLong || tokens.numel() == 0)
    throw UsageError("tokens are {} of {}: give [batch, length] of int64, with at least one token",
                     c10::str(tokens.sizes()), c10::toString(tokens.scalar_type()));
  if (first + tokens.size(1) > config_.max_positions)
    throw UsageError("{} tokens{} do not fit into the model's {} positions", tokens.size(1),
                     first == 0 ? "" : fmt::format(" after {}", first), config_.max_positions);
}

}  // namespace lockstep::models
