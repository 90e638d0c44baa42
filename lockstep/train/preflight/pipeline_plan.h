// The pipeline of a run: what its ranks do in a step, and which layers they have. No LibTorch.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/placement.h>
#include <lockstep/models/spec/config.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

struct RunPipeline {
  pipeline::Schedule schedule;         // of a step
  std::vector<mesh::Interval> layers;  // of each stage
};

// What ranks do in a step of so many micro-batches. UsageError for a schedule file for other
// numbers of ranks or micro-batches.
pipeline::Schedule schedule_of(const ParallelSection& parallel, std::int64_t num_micro_batches);

// The pipeline of a run whose batch is cut into `num_micro_batches`. Layers that will be balanced
// by measured time are balanced by compute here. UsageError, with the numbers and the way out, for
// more stages than layers, layers that do not add up, and a schedule file for other numbers of
// ranks or micro-batches.
RunPipeline resolve_pipeline(const TrainConfig& config, const models::ModelConfig& model,
                             std::int64_t num_micro_batches);

// How long ranks are idle, and what to change, where a step has fewer micro-batches than stages;
// empty elsewhere.
std::string idle_note(const RunPipeline& pipeline);

// The number of parameters of each layer; the first with the embedding, the last with the head.
std::vector<double> parameters_of_layers(const models::ModelConfig& model);
std::vector<double> compute_of_layers(const models::ModelConfig& model,
                                      std::int64_t sequence_length);

// So that the dearest stage costs as little as it can.
std::vector<mesh::Interval> balanced_layers(const std::vector<double>& costs, int num_stages);

}  // namespace lockstep::train
