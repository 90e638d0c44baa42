// One rank's part of a language model that is spread over all axes of a mesh, and its training
// steps.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/distributed/make_parallel.h>
#include <lockstep/distributed/model_parts.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/models/language_model.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

#include "model_layouts.h"

namespace lockstep::parity {

inline constexpr std::int64_t kModelLength = 16;

// The way in which a step is run, which every layout can take.
struct StepWay {
  std::string name;
  int num_passes = 1;     // passes or micro-batches on each rank
  double recomputed = 0;  // share of the blocks that are recomputed
};

// The types and the device of a model's numbers.
struct Numbers {
  at::ScalarType type = at::kDouble;  // type of its weights
  // The type of computations if it is another: by autocast, or by the strategy's mixed precision.
  std::optional<at::ScalarType> computed_in = {};
  c10::Device device = at::kCPU;
  double tolerance = 1e-9;  // largest difference from one process, relative to the largest number

  std::string text() const;
};

// The number of samples in a batch: some for each pass of each rank that has its own samples.
std::int64_t num_samples(const ModelLayout& layout, const StepWay& way);

// Makes the model in training mode.
std::shared_ptr<models::LanguageModel> make_subject(const models::ModelConfig& config,
                                                    const Numbers& numbers);

// Runs the whole batch of a step in one pass of one process. Returns the mean loss.
double one_process_pass(models::LanguageModel& model, const Numbers& numbers, std::int64_t step,
                        std::int64_t samples);

class SpreadModel {
 public:
  SpreadModel(const models::ModelConfig& config, const Numbers& numbers, const ModelLayout& layout,
              const StepWay& way, const std::shared_ptr<comm::Communicator>& world,
              const optim::OptimizerOptions& optimizer = optim::SGDOptions{.momentum = 0.9});

  // Runs forward and backward. Returns the mean loss over all ranks.
  double pass(std::int64_t step);
  // Clips the gradients and returns their norm.
  double clip(double max_norm);
  // Makes a step; gradients are undefined afterwards.
  void step(double learning_rate);

  // All gradients, or weights, whole and by name, on rank 0 of the world; empty elsewhere.
  std::map<std::string, at::Tensor> gradients();
  std::map<std::string, at::Tensor> weights();

  // This rank's part of the model and the optimizer, as checkpoints have it; and what must be
  // called once a checkpoint has been read into it.
  std::vector<mesh::HeldTensor> state();
  void state_was_read(const std::vector<mesh::HeldTensor>& state);

 private:
  // A range of a step's batch.
  struct Samples {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  Samples samples_of(int pass) const;
  std::int64_t count_of_targets() const;
  std::map<std::string, at::Tensor> joined(const std::vector<NamedTensor>& mine) const;
  void cut_into_stages();

  ModelLayout layout_;
  int num_passes_;
  std::int64_t num_samples_;
  std::int64_t step_ = 0;
  DistributedConfig config_;
  std::optional<at::ScalarType> autocast_;
  JobAxes axes_;
  mesh::DeviceMesh mesh_;
  std::shared_ptr<models::LanguageModel> model_;
  std::optional<SelectiveGradientCheckpointing> recomputed_;
  std::optional<pipeline::Pipeline> pipeline_;
  std::optional<ModelParts> parts_;
  std::unique_ptr<data_parallel::ParallelModel> parallel_;
  std::unique_ptr<optim::Optimizer> optimizer_;
};

}  // namespace lockstep::parity
