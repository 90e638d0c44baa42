#include "spread_model.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/device/autocast.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/models/make_model.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/recovery/checkpointer.h>

namespace lockstep::parity {

namespace {

using models::LanguageModel;
using models::ModelConfig;

constexpr const char* kOptimizerPrefix = "optimizer/";

struct TokensAndTargets {
  at::Tensor tokens;
  at::Tensor targets;
};

TokensAndTargets batch_of(std::int64_t step, const LanguageModel& model, std::int64_t samples) {
  const at::Tensor text =
      (at::arange(samples * (kModelLength + 1), at::kLong) * (7 + step) + step * step)
          .remainder(model.config().vocab_size)
          .view({samples, kModelLength + 1})
          .to(model.parameters().front().device());
  at::Tensor targets = text.narrow(1, 1, kModelLength).clone();
  targets[1].narrow(0, 3, 5).fill_(nn::kIgnoredTarget);
  return {text.narrow(1, 0, kModelLength).clone(), targets};
}

// Takes some samples of the batch; the random numbers drawn next are theirs.
TokensAndTargets take(LanguageModel& model, std::int64_t step, std::int64_t samples,
                      std::int64_t first, std::int64_t count) {
  const TokensAndTargets all = batch_of(step, model, samples);
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(first + i);
  model.set_random_position(static_cast<std::uint64_t>(step), rows);
  return {all.tokens.narrow(0, first, count), all.targets.narrow(0, first, count)};
}

std::unique_ptr<device::Autocast> cast_to(const std::optional<at::ScalarType>& type,
                                          const LanguageModel& model) {
  if (!type) return nullptr;
  return std::make_unique<device::Autocast>(model.parameters().front().device().type(), *type);
}

DistributedConfig config_of(const ModelLayout& layout, const Numbers& numbers) {
  DistributedConfig config;
  config.mode = ParallelMode::FSDP;
  config.sharding_strategy = layout.strategy;
  config.model_parallel = {.tensor = layout.tp, .pipeline = layout.pp, .context = layout.cp};
  if (layout.strategy == ShardingStrategy::HYBRID_SHARD)
    config.mesh = {{"dp_replicate", layout.replicate}, {"dp_shard", layout.shard}};
  if (takes_units(config)) config.fsdp.mixed_precision.param_dtype = numbers.computed_in;
  if (layout.offload)
    config.fsdp.cpu_offload = {.offload_optimizer = true,
                               .offload_params = layout.strategy == ShardingStrategy::FULL_SHARD};
  return config;
}

}  // namespace

std::string Numbers::text() const {
  return fmt::format("{}{}", c10::toString(computed_in.value_or(type)),
                     device.is_cpu() ? "" : " on a GPU");
}

std::shared_ptr<LanguageModel> make_subject(const ModelConfig& config, const Numbers& numbers) {
  auto model = models::make_model(config, 5);
  model->to(numbers.device, numbers.type);
  return model;
}

std::int64_t num_samples(const ModelLayout& layout, const StepWay& way) {
  return std::max(4, layout.data_ranks() * way.num_passes);
}

double one_process_pass(LanguageModel& model, const Numbers& numbers, std::int64_t step,
                        std::int64_t samples) {
  const auto [tokens, targets] = take(model, step, samples, 0, samples);
  auto cast = cast_to(numbers.computed_in, model);
  const nn::LossSum loss = model.loss(tokens, targets);
  cast.reset();
  (loss.sum / loss.count).backward();
  return loss.sum.item<double>() / static_cast<double>(loss.count);
}

SpreadModel::SpreadModel(const ModelConfig& config, const Numbers& numbers,
                         const ModelLayout& layout, const StepWay& way,
                         const std::shared_ptr<comm::Communicator>& world,
                         const optim::OptimizerOptions& optimizer)
    : layout_(layout),
      num_passes_(way.num_passes),
      num_samples_(num_samples(layout, way)),
      config_(config_of(layout, numbers)),
      autocast_(takes_units(config_) ? std::nullopt : numbers.computed_in),
      axes_(axes_for(config_, {.world = world->size(), .of_host = world->size()})),
      mesh_(world, axes_.axes, {.flatten = joint_groups(axes_)}),
      model_(make_subject(config, numbers)) {
  models::ModelAxes axes{.context_algorithm = layout.algorithm, .context_split = layout.split};
  if (layout.tp > 1)
    axes.tensor = std::make_shared<nn::TensorAxis>(mesh_.axis("tp"), layout.between);
  if (layout.cp > 1) axes.context = mesh_.axis("cp");
  model_->spread(axes);
  if (way.recomputed > 0) recomputed_.emplace(*model_, way.recomputed);
  if (layout.pp > 1) cut_into_stages();
  parts_.emplace(*model_, group_along(mesh_, axes_.model));
  parallel_ = make_parallel(*model_, mesh_, axes_, config_, {.norm_scope = parts_->norm_scope()});
  optimizer_ = parallel_->make_optimizer(
      optimizer, optim::decay_groups(data_parallel::trained_parameters(*model_), 0.01,
                                     optim::DecayRule::matrices));
}

double SpreadModel::pass(std::int64_t step) {
  step_ = step;
  if (pipeline_) {
    parallel_->backward_passes([&]() -> data_parallel::CountedSum {
      return {at::scalar_tensor(pipeline_->run_step(), at::kDouble), count_of_targets()};
    });
    return parallel_->totals().mean_loss();
  }
  for (int pass = 0; pass < num_passes_; ++pass) {
    std::optional<data_parallel::Accumulation> more;
    if (pass + 1 < num_passes_) more.emplace(parallel_->accumulate());
    const Samples samples = samples_of(pass);
    const auto [tokens, targets] = take(*model_, step_, num_samples_, samples.first, samples.count);
    auto cast = cast_to(autocast_, *model_);
    const nn::LossSum loss = model_->loss(tokens, targets);
    cast.reset();
    parallel_->backward(loss.sum, loss.count);
  }
  return parallel_->totals().mean_loss();
}

double SpreadModel::clip(double max_norm) { return parallel_->clip_gradients(max_norm).norm; }

void SpreadModel::step(double learning_rate) {
  optimizer_->step(learning_rate);
  optimizer_->zero_grad();
}

std::map<std::string, at::Tensor> SpreadModel::gradients() {
  std::vector<NamedTensor> mine;
  for (const auto& item : model_->named_parameters()) {
    const at::Tensor gradient = parallel_->full_gradient(item.key());
    // A gradient that never came counts as a wrong number, not as an exception.
    mine.push_back({item.key(), gradient.defined()
                                    ? gradient.clone()
                                    : at::zeros(item.value().sizes(), item.value().options())});
  }
  return joined(mine);
}

std::map<std::string, at::Tensor> SpreadModel::weights() {
  std::vector<NamedTensor> mine = parallel_->full_state_dict({});
  for (auto& [name, tensor] : mine) tensor = tensor.detach().clone();
  return joined(mine);
}

std::vector<mesh::HeldTensor> SpreadModel::state() {
  using Names = ModelParts::Names;
  auto all = internal::below("model/", parts_->placed(parallel_->held_state(), Names::of_tensors));
  for (auto& one : internal::below(
           kOptimizerPrefix,
           parts_->placed(parallel_->held_optimizer_state(*optimizer_), Names::of_state)))
    all.push_back(std::move(one));
  return all;
}

void SpreadModel::state_was_read(const std::vector<mesh::HeldTensor>& state) {
  parallel_->held_state_written();
  std::vector<NamedTensor> loaded;
  for (const mesh::HeldTensor& one : state)
    if (one.name.starts_with(kOptimizerPrefix))
      loaded.push_back({one.name.substr(std::string(kOptimizerPrefix).size()), one.values});
  optimizer_->load_state(loaded);
}

std::map<std::string, at::Tensor> SpreadModel::joined(const std::vector<NamedTensor>& mine) const {
  std::map<std::string, at::Tensor> all;
  if (mesh_.shape().position_in_group(mesh_.rank(), axes_.gradients) != 0) return all;
  for (const auto& [name, tensor] : parts_->join(mine, ModelParts::Names::of_tensors))
    all.emplace(name, tensor);
  return all;
}

SpreadModel::Samples SpreadModel::samples_of(int pass) const {
  const std::int64_t each = num_samples_ / (layout_.data_ranks() * num_passes_);
  const int place = mesh_.shape().position_in_group(mesh_.rank(), axes_.samples);
  return {(place * num_passes_ + pass) * each, each};
}

std::int64_t SpreadModel::count_of_targets() const {
  const at::Tensor targets =
      model_->axes().attended_part(batch_of(step_, *model_, num_samples_).targets);
  std::int64_t count = 0;
  for (int pass = 0; pass < num_passes_; ++pass) {
    const Samples samples = samples_of(pass);
    count += targets.narrow(0, samples.first, samples.count)
                 .ne(nn::kIgnoredTarget)
                 .sum()
                 .item<std::int64_t>();
  }
  return count;
}

void SpreadModel::cut_into_stages() {
  auto schedule = pipeline::make_schedule(
      layout_.schedule,
      {.num_ranks = layout_.pp, .num_micro_batches = num_passes_, .num_chunks = layout_.chunks});
  const std::int64_t num_layers = model_->config().num_layers;
  std::map<int, pipeline::Stage> stages;
  std::vector<mesh::Interval> mine;
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] != mesh_.coordinate("pp")) continue;
    const auto layers = mesh::part_of(num_layers, stage, schedule.num_stages());
    mine.push_back(layers);
    stages[stage].forward = [this, layers, num_layers](int pass,
                                                       const std::vector<at::Tensor>& inputs) {
      const Samples samples = samples_of(pass);
      const auto [tokens, targets] =
          take(*model_, step_, num_samples_, samples.first, samples.count);
      const auto cast = cast_to(autocast_, *model_);
      const at::Tensor made =
          model_->run_layers(layers, tokens, inputs.empty() ? at::Tensor() : inputs.front());
      return std::vector{layers.end == num_layers ? model_->loss_of(made, targets).sum : made};
    };
  }
  model_->keep_layers(mine);
  for (auto& [index, stage] : stages) stage.parameters = model_->parameters();
  pipeline::PipelineOptions options{.device = model_->parameters().front().device()};
  if (model_->config().tie_embeddings) {
    options.tied.push_back({{0, schedule.num_stages() - 1}, model_->tied_weight()});
  }
  pipeline_.emplace(std::move(schedule), std::move(stages), mesh_.axis("pp"), options);
}

}  // namespace lockstep::parity
