#include <lockstep/models/language_model.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_moves.h>

namespace lockstep::models {

LanguageModel::LanguageModel(const ModelConfig& config, std::uint64_t seed)
    : config_(resolved(config)),
      random_(std::make_shared<nn::RandomState>(nn::RandomState{.seed = seed})),
      random_reader_(random_),
      blocks_(activations::Snapshot(
          [random = random_] { return [random, then = *random] { *random = then; }; })) {}

void LanguageModel::spread(const ModelAxes& axes) {
  if (axes_->tensor != nullptr || axes_->context != nullptr)
    throw UsageError("this model is spread over ranks already: spread() is called once");
  if (axes.tensor != nullptr) {
    check_tensor_ranks(config_, axes.tensor->size());
    nn::apply_plan(*this, tensor_plan(config_), axes.tensor);
  }
  *axes_ = axes;
}

at::Tensor LanguageModel::hidden(const at::Tensor& tokens) {
  check_tokens(tokens, 0);
  const ModelAxes::Positions positions = axes_->positions(tokens.size(1));
  random_->positions = axes_->whole_sequences() ? std::vector<mesh::Interval>() : positions.between;
  return do_hidden(axes_->attended_part(tokens), positions, nullptr);
}

at::Tensor LanguageModel::extend(const at::Tensor& tokens, KeyValueCache& cache) {
  const std::int64_t first = cache.length();
  check_tokens(tokens, first);
  if (!axes_->whole_sequences())
    throw UsageError("a model whose sequences are spread over ranks cannot extend a text token by "
                     "token: spread it over a tensor axis without sequence parallelism, or none");
  const mesh::Interval added{.begin = first, .end = first + tokens.size(1)};
  return do_hidden(tokens, {.attended = {added}, .between = {added}}, &cache);
}

at::Tensor LanguageModel::logits(const at::Tensor& tokens) { return logits_of(hidden(tokens)); }

at::Tensor LanguageModel::logits_of(const at::Tensor& hidden) const {
  if (axes_->tensor == nullptr) return at::linear(hidden, output_weight());
  const nn::TensorAxis& axis = *axes_->tensor;
  return nn::gather_features(at::linear(nn::enter_products(hidden, axis), output_weight()), axis);
}

nn::LossSum LanguageModel::loss(const at::Tensor& tokens, const at::Tensor& targets) {
  if (targets.sizes() != tokens.sizes())
    throw UsageError("tokens {} and targets {} differ in shape: each token has one target",
                     c10::str(tokens.sizes()), c10::str(targets.sizes()));
  const at::Tensor made = hidden(tokens);
  const at::Tensor wanted = axes_->attended_part(targets).flatten();
  if (axes_->tensor == nullptr)
    return nn::linear_cross_entropy(made.flatten(0, 1), output_weight(), wanted);
  const nn::TensorAxis& axis = *axes_->tensor;
  const auto mine = mesh::part_of(config_.vocab_size, axis.rank(), axis.size());
  return nn::vocab_parallel_cross_entropy(
      nn::enter_products(made, axis).flatten(0, 1), output_weight(), wanted,
      {.begin = mine.begin, .vocabulary = config_.vocab_size}, axes_->tensor);
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
