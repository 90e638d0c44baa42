// One rank's part of a language model that is spread over all axes of a mesh, and its steps.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/mesh/device_mesh.h>
#include <lockstep/models/language_model.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/generate.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

namespace lockstep::parity {

inline constexpr std::int64_t kModelLength = 16;
inline constexpr std::int64_t kModelSamples = 4;

struct ModelLayout {
  int pp = 1;
  int dp = 1;
  int cp = 1;
  int tp = 1;
  nn::BetweenLayers between = nn::BetweenLayers::whole;
  nn::ContextAlgorithm algorithm = nn::ContextAlgorithm::ring;
  nn::SplitKind split = nn::SplitKind::zigzag;
  pipeline::ScheduleKind schedule = pipeline::ScheduleKind::one_forward_one_backward;
  int chunks = 1;

  std::string text() const;
};

// What goes on in a step, whatever the layout.
struct StepWay {
  std::string name;
  int num_passes = 1;     // or micro-batches, on each rank
  double recomputed = 0;  // share of the blocks
};

// In training mode, of a type of number.
std::shared_ptr<models::LanguageModel> make_subject(const models::ModelConfig& config,
                                                    at::ScalarType type);

// The whole batch of a step in one pass of one process. Returns the mean loss.
double one_process_pass(models::LanguageModel& model, std::int64_t step);

class SpreadModel {
 public:
  SpreadModel(const models::ModelConfig& config, at::ScalarType type, const ModelLayout& layout,
              const StepWay& way, const std::shared_ptr<comm::Communicator>& world);

  models::LanguageModel& model() { return *model_; }

  // Returns the mean loss of all ranks.
  double pass(std::int64_t step);

  // What a parameter, or its gradient, is as a whole, on every rank: `part` is this rank's, and
  // undefined where it has none; `like` is what it should be.
  at::Tensor whole(const std::string& name, const at::Tensor& part, const at::Tensor& like);

 private:
  // Of a step's batch.
  struct Samples {
    std::int64_t first = 0;
    std::int64_t count = 0;
  };

  Samples samples_of(int pass) const;
  std::int64_t count_of_targets() const;
  void cut_into_stages();

  ModelLayout layout_;
  int num_passes_;
  std::int64_t step_ = 0;
  mesh::DeviceMesh mesh_;
  std::shared_ptr<models::LanguageModel> model_;
  std::optional<SelectiveGradientCheckpointing> recomputed_;
  std::optional<pipeline::Pipeline> pipeline_;
  std::optional<replicate::DistributedDataParallel> parallel_;
  std::map<std::string, nn::CutParameter> cut_;
};

}  // namespace lockstep::parity
