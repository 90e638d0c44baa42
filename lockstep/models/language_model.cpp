#include <lockstep/models/language_model.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

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

void LanguageModel::keep_layers(const std::vector<mesh::Interval>& layers) {
  for (const mesh::Interval& one : layers) check_layers(one);
  const auto kept = [&](std::int64_t layer) {
    return std::ranges::any_of(layers, [&](const auto& one) { return one.contains(layer); });
  };
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer)
    if (!kept(layer)) drop_module(*blocks_, std::to_string(layer));
  drop({.embeddings = kept(0), .output = kept(config_.num_layers - 1)});
}

void LanguageModel::drop_module(torch::nn::Module& owner, const std::string& name) {
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : owner.named_children()[name]->parameters())
    parameter.set_data(at::empty({0}, parameter.options()));
  owner.unregister_module(name);
}

at::Tensor LanguageModel::hidden(const at::Tensor& tokens) {
  return run_layers({.begin = 0, .end = config_.num_layers}, tokens, {});
}

at::Tensor LanguageModel::run_layers(mesh::Interval layers, const at::Tensor& tokens,
                                     const at::Tensor& x) {
  check_tokens(tokens, 0);
  check_layers(layers);
  if (x.defined() == (layers.begin == 0))
    throw UsageError("layers {} to {} of the model were {} what those before them made: it is for "
                     "layers that do not begin with the first",
                     layers.begin, layers.end - 1, x.defined() ? "given" : "not given");
  const ModelAxes::Positions positions = axes_->positions(tokens.size(1));
  random_->positions = axes_->whole_sequences() ? std::vector<mesh::Interval>() : positions.between;
  return run(layers, axes_->attended_part(tokens), x, positions, nullptr);
}

at::Tensor LanguageModel::run(mesh::Interval layers, const at::Tensor& tokens, at::Tensor x,
                              const ModelAxes::Positions& positions, KeyValueCache* cache) {
  if (layers.begin == 0) x = embed(tokens, positions);
  for (std::int64_t layer = layers.begin; layer < layers.end; ++layer)
    x = run_block(static_cast<std::size_t>(layer), x, positions, cache);
  return layers.end == config_.num_layers ? last_norm(x) : x;
}

at::Tensor LanguageModel::extend(const at::Tensor& tokens, KeyValueCache& cache) {
  const std::int64_t first = cache.length();
  check_tokens(tokens, first);
  if (!axes_->whole_sequences())
    throw UsageError("a model whose sequences are spread over ranks cannot extend a text token by "
                     "token: spread it over a tensor axis without sequence parallelism, or none");
  const mesh::Interval added{.begin = first, .end = first + tokens.size(1)};
  return run({.begin = 0, .end = config_.num_layers}, tokens, {},
             {.attended = {added}, .between = {added}}, &cache);
}

at::Tensor LanguageModel::logits(const at::Tensor& tokens) { return logits_of(hidden(tokens)); }

at::Tensor LanguageModel::logits_of(const at::Tensor& hidden) const {
  if (axes_->tensor == nullptr) return at::linear(hidden, output_weight());
  const nn::TensorAxis& axis = *axes_->tensor;
  return nn::gather_features(at::linear(nn::enter_products(hidden, axis), output_weight()), axis);
}

nn::LossSum LanguageModel::loss(const at::Tensor& tokens, const nn::Targets& targets) {
  if (targets.tensor.sizes() != tokens.sizes())
    throw UsageError("tokens {} and targets {} differ in shape: each token has one target",
                     c10::str(tokens.sizes()), c10::str(targets.tensor.sizes()));
  return loss_of(hidden(tokens), targets);
}

nn::LossSum LanguageModel::loss_of(const at::Tensor& made, const nn::Targets& targets) const {
  const auto rows_of = [&](const at::Tensor& all) { return axes_->attended_part(all).flatten(); };
  nn::Targets wanted = rows_of(targets.tensor);
  if (targets.on_host.defined()) wanted.on_host = rows_of(targets.on_host);
  if (axes_->tensor == nullptr)
    return nn::linear_cross_entropy(made.flatten(0, 1), output_weight(), wanted);
  const nn::TensorAxis& axis = *axes_->tensor;
  const auto mine = mesh::part_of(config_.vocab_size, axis.rank(), axis.size());
  return nn::vocab_parallel_cross_entropy(
      nn::enter_products(made, axis).flatten(0, 1), output_weight(), wanted,
      {.begin = mine.begin, .vocabulary = config_.vocab_size}, axes_->tensor);
}

at::Tensor LanguageModel::tied_weight() const {
  // A weight that keep_layers() has freed has no elements.
  return config_.tie_embeddings && output_weight().numel() > 0 ? output_weight() : at::Tensor();
}

void LanguageModel::set_random_position(std::uint64_t step, std::vector<std::int64_t> rows) {
  random_->step = step;
  random_->rows = std::move(rows);
}

void LanguageModel::check_layers(mesh::Interval layers) const {
  if (layers.begin < 0 || layers.size() < 1 || layers.end > config_.num_layers)
    throw UsageError("the model has no layers {} to {}: it has {}", layers.begin, layers.end - 1,
                     config_.num_layers);
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
