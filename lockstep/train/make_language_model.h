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

// A model and, where its stages are on several ranks, what runs them.
struct SpreadLanguageModel {
  std::shared_ptr<models::LanguageModel> model;
  std::unique_ptr<LanguageModelPipeline> pipeline;
};

// Every rank calls it. Where strategies, a tensor axis or a pipeline cut the model, no rank ever
// has all of it: initial values are computed a parameter, or a unit of them, at a time.
// `on_timeline` is LanguageModelPipelineOptions'.
SpreadLanguageModel make_language_model(const TrainConfig& config, const ResolvedRun& run,
                                        DistributedManager& dist,
                                        std::function<void(const pipeline::Timeline&)> on_timeline);

// The type of numbers that a config computes in. Nothing for fp32, which is what weights are.
std::optional<c10::ScalarType> scalar_type_of(Precision precision);

// What operators compute in while weights stay what they are: where gradients are whole, weights
// are too, and 16 bits are autocast's; where they are cut, 16 bits are the strategy's. CPUs compute
// in what weights are.
std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device);

}  // namespace lockstep::train
