// The model of a run, spread over its ranks.
#pragma once

#include <functional>
#include <memory>

#include <lockstep/distributed/distributed.h>
#include <lockstep/models/language_model.h>
#include <lockstep/train/config.h>
#include <lockstep/train/language_model_pipeline.h>
#include <lockstep/train/plan.h>

namespace lockstep::train {

// A model and, where its stages are on several ranks, what runs them.
struct SpreadLanguageModel {
  std::shared_ptr<models::LanguageModel> model;
  std::unique_ptr<LanguageModelPipeline> pipeline;
};

// Every rank calls it. Where strategies, a tensor axis or a pipeline cut the model, no rank ever
// has all of it: initial values are computed a parameter, or a unit of them, at a time.
// `on_timeline` is LanguageModelPipelineOptions'.
SpreadLanguageModel make_language_model(const TrainConfig& config, const RunPlan& plan,
                                        DistributedManager& dist,
                                        std::function<void(const pipeline::Timeline&)> on_timeline);

}  // namespace lockstep::train
