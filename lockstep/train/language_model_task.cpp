#include <lockstep/train/language_model_task.h>

#include <ATen/ATen.h>

#include <lockstep/checkpoint/load_held.h>
#include <lockstep/checkpoint/scalar_type.h>
#include <lockstep/checkpoint/tensors.h>
#include <lockstep/models/spec/hugging_face.h>

namespace lockstep::train {

nn::LossSum LanguageModelTask::loss(const data::Batch& batch) {
  return model_->loss(batch.input, {batch.target, batch.target_on_host});
}

Evaluation LanguageModelTask::evaluate(const data::Batch& batch) {
  if (pipeline_ == nullptr) return {.loss = loss(batch), .metric_sums = {}};
  return {.loss = {.sum = at::scalar_tensor(pipeline_->evaluate(batch), at::kDouble),
                   .count = pipeline_->count(batch)},
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
    // As they are there, and then as they are to be.
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
  // Files of models without their output layer leave out the first word of each name.
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

}  // namespace lockstep::train
