#include <lockstep/train/preflight/pipeline_plan.h>

#include <algorithm>
#include <numeric>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/partition.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

namespace lockstep::train {

namespace {

pipeline::Schedule schedule_from_file(const ParallelSection& parallel,
                                      std::int64_t num_micro_batches) {
  pipeline::Schedule schedule = pipeline::read_schedule(parallel.schedule_file);
  const std::string file = parallel.schedule_file.string();
  if (schedule.num_ranks() != parallel.pipeline)
    throw UsageError("'{}' is a schedule for {} ranks, and parallel.pipeline is {}: make them the "
                     "same",
                     file, schedule.num_ranks(), parallel.pipeline);
  if (schedule.num_micro_batches != num_micro_batches)
    throw UsageError("'{}' is a schedule of {} micro-batches, and a step of this run has {}: set "
                     "gradient_accumulation_steps to {}",
                     file, schedule.num_micro_batches, num_micro_batches,
                     schedule.num_micro_batches);
  return schedule;
}

// Advice with fewer stages that would work: a pipeline of one rank is none, and has no schedule.
std::string fewer_stages(const ParallelSection& parallel, std::int64_t num_stages,
                         std::int64_t num_layers) {
  if (!parallel.schedule_file.empty())
    return fmt::format("a schedule of at most {} stage{}", num_layers, num_layers == 1 ? "" : "s");
  const std::int64_t chunks = num_stages / parallel.pipeline;
  const char* one_chunk = pipeline::definition_of(parallel.schedule).has_free_chunks
                              ? "parallel.chunks of 1"
                              : "a schedule with one stage a rank, such as zb-h1";
  if (num_layers / parallel.pipeline > 1)
    return fmt::format("parallel.chunks of at most {}", num_layers / parallel.pipeline);
  if (num_layers >= parallel.pipeline) return one_chunk;
  const std::int64_t most_ranks = num_layers / chunks;
  if (most_ranks > 1) return fmt::format("a pipeline of at most {}", most_ranks);
  if (num_layers > 1) return fmt::format("a pipeline of at most {} and {}", num_layers, one_chunk);
  return "no pipeline, without all that parallel says of it";
}

std::vector<mesh::Interval> given_layers(const ParallelSection& parallel,
                                         const models::ModelConfig& model, int num_stages) {
  const std::vector<std::int64_t>& sizes = parallel.stage_layers;
  if (sizes.size() != static_cast<std::size_t>(num_stages))
    throw UsageError("parallel.stage_layers has {} numbers, and the schedule has {} stages: give "
                     "one for each",
                     sizes.size(), num_stages);
  const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
  if (total != model.num_layers)
    throw UsageError("parallel.stage_layers is [{}], which is {} layers, and the model has {}: "
                     "make them add up",
                     fmt::join(sizes, ", "), total, model.num_layers);
  std::vector<mesh::Interval> layers;
  for (const std::int64_t size : sizes) {
    const std::int64_t begin = layers.empty() ? 0 : layers.back().end;
    layers.push_back({begin, begin + size});
  }
  return layers;
}

std::vector<mesh::Interval> equal_layers(std::int64_t num_layers, int num_stages) {
  std::vector<mesh::Interval> layers;
  for (int stage = 0; stage < num_stages; ++stage)
    layers.push_back(mesh::part_of(num_layers, stage, num_stages));
  return layers;
}

}  // namespace

pipeline::Schedule schedule_of(const ParallelSection& parallel, std::int64_t num_micro_batches) {
  if (!parallel.schedule_file.empty()) return schedule_from_file(parallel, num_micro_batches);
  return pipeline::make_schedule(parallel.schedule,
                                 {.num_ranks = static_cast<int>(parallel.pipeline),
                                  .num_micro_batches = static_cast<int>(num_micro_batches),
                                  .num_chunks = static_cast<int>(parallel.chunks)});
}

RunPipeline resolve_pipeline(const TrainConfig& config, const models::ModelConfig& model,
                             std::int64_t num_micro_batches) {
  const ParallelSection& parallel = config.parallel;
  RunPipeline pipeline{.schedule = schedule_of(parallel, num_micro_batches), .layers = {}};
  const int num_stages = pipeline.schedule.num_stages();
  if (num_stages > model.num_layers)
    throw UsageError(
        "parallel.pipeline is {}, which with this schedule is {} stages, and the model "
        "has {} layer{}, of which each stage needs one: take {}, or more layers",
        parallel.pipeline, num_stages, model.num_layers, model.num_layers == 1 ? "" : "s",
        fewer_stages(parallel, num_stages, model.num_layers));
  if (!parallel.stage_layers.empty()) {
    pipeline.layers = given_layers(parallel, model, num_stages);
    return pipeline;
  }
  switch (parallel.balance) {
    case StageBalance::layers: pipeline.layers = equal_layers(model.num_layers, num_stages); break;
    case StageBalance::parameters:
      pipeline.layers = balanced_layers(parameters_of_layers(model), num_stages);
      break;
    case StageBalance::compute:
    case StageBalance::time:
      pipeline.layers =
          balanced_layers(compute_of_layers(model, config.data.sequence_length), num_stages);
      break;
  }
  return pipeline;
}

std::string idle_note(const RunPipeline& pipeline) {
  const int num_micro_batches = pipeline.schedule.num_micro_batches;
  if (num_micro_batches >= pipeline.schedule.num_stages()) return "";
  return fmt::format("{} stages have {} micro-batch{} a step, and ranks are idle for {:.0f} % of "
                     "it: more of them, by a larger gradient_accumulation_steps or a smaller "
                     "train_micro_batch_size_per_gpu, make that less",
                     pipeline.schedule.num_stages(), num_micro_batches,
                     num_micro_batches == 1 ? "" : "es",
                     100 * pipeline::bubble(pipeline::simulate(pipeline.schedule)));
}

std::vector<double> parameters_of_layers(const models::ModelConfig& model) {
  const auto count = [&](const models::ModelShare& share) {
    return static_cast<double>(models::num_parameters(model, share));
  };
  std::vector<double> costs(static_cast<std::size_t>(model.num_layers), count({.num_layers = 1}));
  costs.front() += count({.has_embedding = true});
  costs.back() += count({.has_head = true});
  return costs;
}

std::vector<double> compute_of_layers(const models::ModelConfig& model,
                                      std::int64_t sequence_length) {
  // A token meets each weight once, and in attention half of the keys and values before it.
  const double attention = static_cast<double>(sequence_length * model.num_heads * model.head_dim);
  const double layer =
      static_cast<double>(models::num_parameters(model, {.num_layers = 1})) + attention;
  std::vector<double> costs(static_cast<std::size_t>(model.num_layers), layer);
  costs.back() += static_cast<double>(model.vocab_size * model.hidden_size);
  return costs;
}

std::vector<mesh::Interval> balanced_layers(const std::vector<double>& costs, int num_stages) {
  const pipeline::Cuts cuts = pipeline::partition(costs, num_stages);
  std::vector<mesh::Interval> layers;
  for (std::size_t stage = 0; stage + 1 < cuts.size(); ++stage)
    layers.push_back({cuts[stage], cuts[stage + 1]});
  return layers;
}

}  // namespace lockstep::train
