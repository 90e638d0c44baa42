// One rank's part of a language model that is spread over all axes of a mesh, and its steps.
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

// What goes on in a step, whatever the layout.
struct StepWay {
  std::string name;
  int num_passes = 1;     // or micro-batches, on each rank
  double recomputed = 0;  // share of the blocks
};

// What a model computes with.
struct Numbers {
  at::ScalarType type = at::kDouble;  // of its weights
  // Where it is another one: by autocast, or the strategy's mixed precision.
  std::optional<at::ScalarType> computed_in = {};
  c10::Device device = at::kCPU;
  double tolerance = 1e-9;  // of a difference from one process, relative to the largest number

  std::string text() const;
};

// Samples in a batch: some for each pass of each rank that has its own.
std::int64_t num_samples(const ModelLayout& layout, const StepWay& way);

// In training mode.
std::shared_ptr<models::LanguageModel> make_subject(const models::ModelConfig& config,
                                                    const Numbers& numbers);

// The whole batch of a step in one pass of one process. Returns the mean loss.
double one_process_pass(models::LanguageModel& model, const Numbers& numbers, std::int64_t step,
                        std::int64_t samples);

class SpreadModel {
 public:
  SpreadModel(const models::ModelConfig& config, const Numbers& numbers, const ModelLayout& layout,
              const StepWay& way, const std::shared_ptr<comm::Communicator>& world,
              const optim::OptimizerOptions& optimizer = optim::SGDOptions{.momentum = 0.9});

  // Forward and backward. Returns the mean loss of all ranks.
  double pass(std::int64_t step);
  // Clips, and returns the norm.
  double clip(double max_norm);
  // Leaves gradients undefined.
  void step(double learning_rate);

  // Every gradient, or weight, as a whole, by name: on rank 0 of the world, and nothing elsewhere.
  std::map<std::string, at::Tensor> gradients();
  std::map<std::string, at::Tensor> weights();

  // What this rank has of the model and the optimizer, as checkpoints have it, and what is to be
  // done once a checkpoint was read into it.
  std::vector<mesh::HeldTensor> state();
  void state_was_read(const std::vector<mesh::HeldTensor>& state);

 private:
  // Of a step's batch.
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
