// The model of a run, spread over its ranks.
#pragma once

#include <functional>
#include <memory>

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

}  // namespace lockstep::train
