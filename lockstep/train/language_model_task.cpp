#include <lockstep/train/language_model_task.h>

#include <algorithm>
#include <chrono>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/deferred/construction.h>
#include <lockstep/device/autocast.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/models/make_model.h>
#include <lockstep/models/spec/hugging_face.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/resume_check.h>

namespace lockstep::train {

nn::LossSum LanguageModelTask::loss(const data::Batch& batch) {
  return model_->loss(batch.input, {batch.target, batch.target_on_host});
}

Evaluation LanguageModelTask::evaluate(const data::Batch& batch) {
  if (pipeline_ == nullptr) return {.loss = loss(batch), .metric_sums = {}};
  return {.loss = {.sum = at::scalar_tensor(pipeline_->evaluate(batch), at::kDouble),
                   .count = pipeline_->expected_count(batch)},
          .metric_sums = {}};
}

void LanguageModelTask::begin(std::int64_t step, const std::vector<std::int64_t>& rows) {
  model_->set_random_position(static_cast<std::uint64_t>(step), rows);
}

std::map<std::string, std::string> LanguageModelTask::checkpoint_files() const {
  std::map<std::string, std::string> files = more_files_;
  files["config.json"] = models::to_hugging_face(model_->config());
  return files;
}

namespace {

void load_checkpoint_weights(const std::vector<NamedTensor>& weights,
                             const std::filesystem::path& folder) {
  const c10::NoGradGuard no_grad;
  checkpoint::CheckpointReader reader(folder);
  std::vector<mesh::HeldTensor> stored;
  for (const auto& [name, tensor] : weights) {
    // Reads each tensor in the type that it has in the file; it is converted afterwards.
    mesh::HeldTensor held = mesh::whole_tensor("model/" + name, tensor);
    const auto* const record = reader.find(held.name);
    const auto type = record == nullptr ? std::nullopt : checkpoint::scalar_type_of(record->dtype);
    if (type && at::isFloatingType(*type) && at::isFloatingType(tensor.scalar_type()))
      held.values = at::empty(tensor.sizes(), *type);
    stored.push_back(std::move(held));
  }
  if (const std::string fault = checkpoint::fit_fault(reader.manifest().tensors, stored);
      !fault.empty())
    throw UsageError("the checkpoint '{}' does not fit this model: {}", folder.string(), fault);
  checkpoint::load_held(reader, stored);
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i].tensor.copy_(stored[i].values);
}

}  // namespace

void load_weights(const models::ModelConfig& config, const std::vector<NamedTensor>& weights,
                  const std::filesystem::path& folder) {
  if (checkpoint::is_checkpoint(folder)) return load_checkpoint_weights(weights, folder);
  const checkpoint::SafetensorsFolder files(folder);
  // Files of models without their output layer leave out the first component of each name.
  std::map<std::string, std::string> file_names;
  for (const checkpoint::StoredTensor& tensor : files.tensors())
    if (const auto parameter = models::parameter_of(config, tensor.name()))
      file_names[*parameter] = tensor.name();
  checkpoint::load_tensors_into(
      files, weights,
      {.conversion = checkpoint::Conversion::floating,
       .skipped = [&](const std::string& name) { return !models::parameter_of(config, name); },
       .stored =
           [&](const std::string& name) {
             const auto found = file_names.find(name);
             return checkpoint::StoredForm{
                 .name = found == file_names.end() ? models::file_name_of(name) : found->second,
                 .transposed = models::stored_transposed(config, name)};
           }});
}

void load_weights(models::LanguageModel& model, const std::filesystem::path& folder) {
  std::vector<NamedTensor> weights;
  for (const auto& item : model.named_parameters()) weights.push_back({item.key(), item.value()});
  load_weights(model.config(), weights, folder);
}

LanguageModelPipeline::LanguageModelPipeline(std::shared_ptr<models::LanguageModel> model,
                                             const std::shared_ptr<comm::Communicator>& group,
                                             const RunPipeline& pipeline,
                                             LanguageModelPipelineOptions options)
    : model_(std::move(model)), options_(std::move(options)) {
  std::vector<mesh::Interval> mine;
  for (std::size_t stage = 0; stage < pipeline.layers.size(); ++stage) {
    if (pipeline.schedule.rank_of_stage[stage] != group->rank()) continue;
    mine.push_back(pipeline.layers[stage]);
    layers_[static_cast<int>(stage)] = mine.back();
  }
  model_->keep_layers(mine);
  model_->to(options_.device);
  training_ = make(pipeline.schedule, group);
  evaluation_ = make(pipeline::one_micro_batch(pipeline.schedule.rank_of_stage), group);
}

std::unique_ptr<pipeline::Pipeline> LanguageModelPipeline::make(
    const pipeline::Schedule& schedule, const std::shared_ptr<comm::Communicator>& group) {
  std::map<int, pipeline::Stage> stages;
  for (const auto& [stage, layers] : layers_)
    stages[stage] = {.forward =
                         [this, layers = layers](int micro_batch, const auto& inputs) {
                           return forward(layers, micro_batch, inputs);
                         },
                     .parameters = model_->parameters()};
  pipeline::PipelineOptions options{.device = options_.device};
  if (model_->config().tie_embeddings)
    options.tied.push_back({{0, schedule.num_stages() - 1}, model_->tied_weight()});
  return std::make_unique<pipeline::Pipeline>(schedule, std::move(stages), group,
                                              std::move(options));
}

PassesLoss LanguageModelPipeline::run(std::int64_t step, const std::vector<data::Batch>& batches,
                                      const GradientScale& scale) {
  const auto num_micro_batches = static_cast<std::size_t>(training_->schedule().num_micro_batches);
  LOCKSTEP_CHECK(batches.size() <= num_micro_batches, "{} batches", batches.size());
  std::vector<data::Batch> full;
  PassesLoss loss;
  for (const data::Batch& batch : batches) {
    full.push_back(filled_up(batch));
    loss.count += expected_count(batch);
  }
  while (full.size() < num_micro_batches) full.push_back(filled_up({}));
  batches_ = &full;
  scale_ = scale;
  step_ = step;
  const bool timed = step + 1 == options_.timeline_step;
  loss.sum =
      training_->run_step(timed ? pipeline::TimesOf::work_done : pipeline::TimesOf::work_asked_for);
  if (timed) {
    const pipeline::Timeline timeline = training_->timeline();
    if (options_.on_timeline) options_.on_timeline(timeline);
  }
  return loss;
}

void LanguageModelPipeline::check_passes(std::int64_t num_passes) const {
  const int num_micro_batches = training_->schedule().num_micro_batches;
  if (num_passes > num_micro_batches)
    throw UsageError("a step has {} passes, and the pipeline's schedule {} micro-batches: let "
                     "gradient_accumulation_steps stay what the run began with",
                     num_passes, num_micro_batches);
}

double LanguageModelPipeline::evaluate(const data::Batch& batch) {
  const std::vector<data::Batch> batches = {filled_up(batch)};
  batches_ = &batches;
  scale_ = nullptr;
  return evaluation_->evaluate();
}

data::Batch LanguageModelPipeline::filled_up(const data::Batch& batch) const {
  const std::int64_t missing = options_.micro_batch - batch.size();
  if (missing == 0) return batch;
  const auto tokens = at::dtype(at::kLong).device(options_.device);
  const std::vector<std::int64_t> shape = {missing, options_.sequence_length};
  data::Batch full = batch;
  full.input = at::zeros(shape, tokens);
  full.target = at::full(shape, nn::kIgnoredTarget, tokens);
  full.target_on_host = at::Tensor();
  full.rows.resize(static_cast<std::size_t>(options_.micro_batch));
  if (batch.size() == 0) return full;
  full.input = at::cat({batch.input, full.input});
  full.target = at::cat({batch.target, full.target});
  return full;
}

std::int64_t LanguageModelPipeline::expected_count(const data::Batch& batch) const {
  if (batch.size() == 0) return 0;
  return model_->axes()
      .attended_part(batch.target_on_host.defined() ? batch.target_on_host : batch.target)
      .ne(nn::kIgnoredTarget)
      .sum()
      .item<std::int64_t>();
}

std::vector<at::Tensor> LanguageModelPipeline::forward(mesh::Interval layers, int micro_batch,
                                                       const std::vector<at::Tensor>& inputs) {
  const data::Batch& batch = (*batches_)[static_cast<std::size_t>(micro_batch)];
  model_->set_random_position(static_cast<std::uint64_t>(step_), batch.rows);
  std::optional<device::Autocast> cast;
  if (options_.autocast) cast.emplace(options_.device.type(), *options_.autocast);
  const at::Tensor made =
      model_->run_layers(layers, batch.input, inputs.empty() ? at::Tensor() : inputs.front());
  if (layers.end < model_->config().num_layers) return {made};
  const at::Tensor loss = model_->loss_of(made, {batch.target, batch.target_on_host}).sum;
  return {scale_ ? scale_(loss) : loss};
}

namespace {

double seconds_once_done(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::vector<double> seconds_of_layers(models::LanguageModel& model, std::int64_t micro_batch,
                                      std::int64_t sequence_length,
                                      std::optional<c10::ScalarType> autocast) {
  const std::int64_t num_layers = model.config().num_layers;
  const c10::Device device = model.parameters().front().device();
  const at::Tensor tokens =
      at::zeros({micro_batch, sequence_length}, at::dtype(at::kLong).device(device));
  std::vector<std::int64_t> rows(static_cast<std::size_t>(micro_batch), 0);
  const auto run = [&](std::int64_t layer) {
    at::Tensor x;  // [micro_batch, positions, hidden]
    model.set_random_position(0, rows);
    std::optional<device::Autocast> cast;
    if (autocast) cast.emplace(device.type(), *autocast);
    if (layer > 0) {
      const at::NoGradGuard no_grad;
      x = model.run_layers({0, 1}, tokens, {});
    }
    if (x.defined()) x.requires_grad_();
    const double start = seconds_once_done(device);
    at::Tensor made = model.run_layers({layer, layer + 1}, tokens, x);
    if (layer + 1 == num_layers) made = model.loss_of(made, tokens).sum;
    cast.reset();
    made.sum().backward();
    const double taken = seconds_once_done(device) - start;
    for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
    return taken;
  };
  // The least of a few measurements, because disturbances only make them longer.
  const auto least = [&](std::int64_t layer) {
    double seconds = std::numeric_limits<double>::infinity();
    for (int time = 0; time < 3; ++time) seconds = std::min(seconds, run(layer));
    return seconds;
  };
  std::vector<double> seconds;
  seconds.push_back(least(0));
  if (num_layers > 2) seconds.resize(static_cast<std::size_t>(num_layers) - 1, least(1));
  if (num_layers > 1) seconds.push_back(least(num_layers - 1));
  return seconds;
}

namespace {

// All ranks use the main rank's times: with times of their own they would cut different stages.
std::vector<double> main_ranks_layer_times(models::LanguageModel& model, const TrainConfig& config,
                                           const ResolvedRun& run, const DistributedManager& dist) {
  std::vector<double> seconds = seconds_of_layers(
      model, run.batch.micro, config.data.sequence_length, autocast_of(config, dist.device()));
  if (!dist.is_main()) std::ranges::fill(seconds, 0.0);
  return dist.sum(std::move(seconds));
}

// The axes of ranks that work together on the same samples.
models::ModelAxes axes_of(const ParallelSection& parallel, DistributedManager& dist) {
  models::ModelAxes axes;
  if (parallel.tensor > 1)
    axes.tensor =
        std::make_shared<nn::TensorAxis>(dist.mesh().axis("tp"), dist.config().between_layers);
  if (parallel.context > 1) axes.context = dist.mesh().axis("cp");
  axes.context_algorithm = parallel.context_algorithm;
  return axes;
}

SpreadLanguageModel spread_model(
    const std::function<std::shared_ptr<models::LanguageModel>()>& make, const TrainConfig& config,
    const ResolvedRun& run, DistributedManager& dist,
    std::function<void(const pipeline::Timeline&)> on_timeline) {
  const ParallelSection& parallel = config.parallel;
  deferred::Construction construction;
  SpreadLanguageModel made{.model = construction.construct(make), .pipeline = nullptr};
  const auto& model = made.model;
  const bool is_timed = run.pipeline && parallel.balance == StageBalance::time;
  if (is_timed) {
    // Layers are timed before they are given to stages, so every rank makes all of them.
    construction.keep(model->parameters());
    model->to(dist.device());
  }
  model->spread(axes_of(parallel, dist));
  if (run.pipeline) {
    RunPipeline stages = *run.pipeline;
    if (is_timed)
      stages.layers = balanced_layers(main_ranks_layer_times(*model, config, run, dist),
                                      stages.schedule.num_stages());
    made.pipeline = std::make_unique<LanguageModelPipeline>(
        model, dist.mesh().axis("pp"), stages,
        LanguageModelPipelineOptions{.device = dist.device(),
                                     .micro_batch = run.batch.micro,
                                     .sequence_length = config.data.sequence_length,
                                     .autocast = autocast_of(config, dist.device()),
                                     .timeline_step = parallel.timeline_step,
                                     .on_timeline = std::move(on_timeline)});
  }
  construction.keep(model->parameters());
  construction.keep_all();
  dist.wrap_model(model);
  return made;
}

}  // namespace

SpreadLanguageModel make_language_model(
    const TrainConfig& config, const ResolvedRun& run, DistributedManager& dist,
    std::function<void(const pipeline::Timeline&)> on_timeline) {
  const models::ModelConfig& sizes = run.model;
  const auto make = [&] {
    const auto model = models::make_model(sizes, static_cast<std::uint64_t>(config.seed));
    if (config.recomputed_blocks > 0)
      SelectiveGradientCheckpointing(*model, config.recomputed_blocks);
    return model;
  };
  SpreadLanguageModel made;
  if (config.parallel.ranks_together() > 1)
    made = spread_model(make, config, run, dist, std::move(on_timeline));
  else
    made.model = takes_units(dist.config()) ? dist.build_model(make) : dist.wrap_model(make());
  if (config.model.from.empty()) return made;
  const auto& model = made.model;
  // The file is read into whole tensors beside the model's own, which may be cut.
  const std::vector<NamedTensor> weights = dist.full_state_dict(model);
  on_main_rank(dist, [&] {
    load_weights(sizes, weights, config.model.from);
    return std::string();
  });
  dist.load_full_state_dict(model, weights);
  return made;
}

}  // namespace lockstep::train
