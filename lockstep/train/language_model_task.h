// A language model as a training task: how it is made and spread over the ranks, and how its
// pipeline of stages runs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include <lockstep/data/dataset.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/mesh/tensors.h>
#include <lockstep/models/language_model.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/pipeline_plan.h>
#include <lockstep/train/preflight/run_plan.h>
#include <lockstep/train/task.h>

namespace lockstep::train {

struct LanguageModelPipelineOptions {
  c10::Device device = at::kCPU;  // the device of this rank's stages
  std::int64_t micro_batch = 1;   // samples
  std::int64_t sequence_length = 0;
  // the type that operators compute in during forward passes
  std::optional<c10::ScalarType> autocast = {};
  // After this step, counted from 1, each rank gets the times at which all ranks computed each part
  // of it; 0: never.
  std::int64_t timeline_step = 0;
  std::function<void(const pipeline::Timeline&)> on_timeline = {};
};

// Runs a language model whose stages are on several ranks. Reduces the model to this rank's stages
// and runs steps of micro-batches through the stages of all ranks. Every rank of the group makes
// one, with the same model, and calls the same functions with the same batches.
//
// Ownership: shares the model. Threading: one thread. Failure: as pipeline::Pipeline.
class LanguageModelPipeline : public PipelinePasses {
 public:
  LanguageModelPipeline(std::shared_ptr<models::LanguageModel> model,
                        const std::shared_ptr<comm::Communicator>& group,
                        const RunPipeline& pipeline, LanguageModelPipelineOptions options = {});

  // Takes at most as many batches as the pipeline has micro-batches, each of at most `micro_batch`
  // samples.
  PassesLoss run(std::int64_t step, const std::vector<data::Batch>& batches,
                 const GradientScale& scale = {}) override;
  // The number of a batch's targets that count on this rank of the data.
  std::int64_t expected_count(const data::Batch& batch) const override;
  void check_passes(std::int64_t num_passes) const override;
  bool takes_empty_batches() const override { return true; }

  // Runs the forward pass of one batch of at most `micro_batch` samples.
  double evaluate(const data::Batch& batch);

 private:
  // Adds samples that do not count to a batch that is too small, because all batches in a pipeline
  // have one shape.
  data::Batch filled_up(const data::Batch& batch) const;
  std::unique_ptr<pipeline::Pipeline> make(const pipeline::Schedule& schedule,
                                           const std::shared_ptr<comm::Communicator>& group);
  std::vector<at::Tensor> forward(mesh::Interval layers, int micro_batch,
                                  const std::vector<at::Tensor>& inputs);

  std::shared_ptr<models::LanguageModel> model_;
  LanguageModelPipelineOptions options_;
  std::map<int, mesh::Interval> layers_;               // layers of this rank's stages
  std::unique_ptr<pipeline::Pipeline> training_;       // runs all micro-batches of a step
  std::unique_ptr<pipeline::Pipeline> evaluation_;     // runs a single one
  const std::vector<data::Batch>* batches_ = nullptr;  // batches of the step under way
  GradientScale scale_;  // scale of the step under way; none in an evaluation
  std::int64_t step_ = 0;
};

// Checkpoints are folders that Hugging Face's tools load.
class LanguageModelTask : public Task {
 public:
  // `more_files` are kept in each checkpoint: names, and their texts. `pipeline` is null if each
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

// Reads the weights of such a model from a checkpoint or a Hugging Face folder, in any floating
// type. `weights` has all of the model's weights by name. UsageError names each tensor that does
// not fit; DamagedCheckpoint names a file that is not as it was written.
void load_weights(const models::ModelConfig& config, const std::vector<NamedTensor>& weights,
                  const std::filesystem::path& folder);
void load_weights(models::LanguageModel& model, const std::filesystem::path& folder);

// Seconds of forward and backward of a micro-batch, for each layer. The first includes the
// embedding and the last the head; those between are taken to be alike. `autocast` is the type that
// operators compute in, as in training. Gradients are undefined afterwards. Every rank that shares
// the model's layers or sequences calls it, before any stage is cut off.
std::vector<double> seconds_of_layers(models::LanguageModel& model, std::int64_t micro_batch,
                                      std::int64_t sequence_length,
                                      std::optional<c10::ScalarType> autocast = {});

// A model and, if its stages are on several ranks, the pipeline that runs them.
struct SpreadLanguageModel {
  std::shared_ptr<models::LanguageModel> model;
  std::unique_ptr<LanguageModelPipeline> pipeline;
};

// Every rank calls it. If strategies, a tensor axis or a pipeline cut the model, no rank ever holds
// all of it: initial values are computed for one parameter, or one unit of parameters, at a time.
// `on_timeline` is that of LanguageModelPipelineOptions.
SpreadLanguageModel make_language_model(const TrainConfig& config, const ResolvedRun& run,
                                        DistributedManager& dist,
                                        std::function<void(const pipeline::Timeline&)> on_timeline);

}  // namespace lockstep::train
