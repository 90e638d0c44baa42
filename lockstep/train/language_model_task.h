// A language model as something to train.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/mesh/tensors.h>
#include <lockstep/models/language_model.h>
#include <lockstep/train/language_model_pipeline.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

// Checkpoints are folders that Hugging Face's tools load.
class LanguageModelTask : public Task {
 public:
  // `more_files` are kept in each checkpoint: names, and their texts. `pipeline` is null where each
  // rank has all layers.
  explicit LanguageModelTask(std::shared_ptr<models::LanguageModel> model,
                             std::map<std::string, std::string> more_files = {},
                             std::unique_ptr<LanguageModelPipeline> pipeline = nullptr)
      : model_(std::move(model)),
        more_files_(std::move(more_files)),
        pipeline_(std::move(pipeline)) {}

  std::shared_ptr<torch::nn::Module> model() const override { return model_; }
  nn::LossSum loss(const data::Batch& batch) override;
  Evaluation evaluate(const data::Batch& batch) override;
  void begin(std::int64_t step, const std::vector<std::int64_t>& rows) override;
  std::map<std::string, std::string> checkpoint_files() const override;
  PipelinePasses* pipeline() override { return pipeline_.get(); }
  Counted counted() const override { return Counted::tokens; }

 private:
  std::shared_ptr<models::LanguageModel> model_;
  std::map<std::string, std::string> more_files_;
  std::unique_ptr<LanguageModelPipeline> pipeline_;
};

// Reads the weights of such a model, which are all in `weights` by their names, from a checkpoint
// or a folder of Hugging Face's, whatever floating type they have there. UsageError naming what
// does not fit, DamagedCheckpoint what is not as it was written.
void load_weights(const models::ModelConfig& config, const std::vector<NamedTensor>& weights,
                  const std::filesystem::path& folder);
void load_weights(models::LanguageModel& model, const std::filesystem::path& folder);

}  // namespace lockstep::train
