#include <lockstep/train/language_model_task.h>

#include <ATen/ATen.h>

#include <lockstep/models/hugging_face.h>

namespace lockstep::train {

nn::LossSum LanguageModelTask::loss(const data::Batch& batch) {
  return model_->loss(batch.input, batch.target);
}

Evaluation LanguageModelTask::evaluate(const data::Batch& batch) {
  if (pipeline_ == nullptr)
    return {.loss = model_->loss(batch.input, batch.target), .metric_sums = {}};
  return {.loss = {.sum = at::scalar_tensor(pipeline_->evaluate(batch), at::kDouble),
                   .count = pipeline_->count(batch)},
          .metric_sums = {}};
}

void LanguageModelTask::begin(std::int64_t step, const std::vector<std::int64_t>& rows) {
  model_->set_random_position(static_cast<std::uint64_t>(step), rows);
}

checkpoint::StoredForms LanguageModelTask::stored_forms() const {
  return train::stored_forms(model_->config());
}

std::map<std::string, std::string> LanguageModelTask::checkpoint_files() const {
  std::map<std::string, std::string> files = more_files_;
  files["config.json"] = models::to_hugging_face(model_->config());
  return files;
}

checkpoint::StoredForms stored_forms(const models::ModelConfig& config) {
  return [config](const std::string& name) {
    return checkpoint::StoredForm{.name = models::file_name_of(name),
                                  .transposed = models::stored_transposed(config, name)};
  };
}

void load_weights(const models::ModelConfig& config, const std::vector<NamedTensor>& weights,
                  const std::filesystem::path& folder) {
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
