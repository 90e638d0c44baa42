// The model of a run, spread over its ranks.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/models/language_model.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/language_model_task.h>
#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::train {

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

// The type that a config computes in; nothing for fp32, the type of the weights.
std::optional<c10::ScalarType> scalar_type_of(Precision precision);

// The type that operators compute in while weights keep theirs. If gradients are whole on each
// rank, so are weights, and a 16-bit precision is autocast's; if gradients are cut, it is the
// strategy's. CPUs compute in the type of the weights.
std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device);

}  // namespace lockstep::train
