#include <lockstep/train/language_model_task.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/held_tensors.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/device/autocast.h>
#include <lockstep/models/spec/hugging_face.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>

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

}  // namespace lockstep::train
