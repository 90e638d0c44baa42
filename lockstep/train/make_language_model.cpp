#include <lockstep/train/make_language_model.h>

#include <algorithm>

#include <lockstep/deferred/construction.h>
#include <lockstep/distributed/config_rules.h>
#include <lockstep/models/make_model.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/language_model_task.h>
#include <lockstep/train/layer_times.h>
#include <lockstep/train/main_rank.h>
#include <lockstep/train/preflight/resume_check.h>

namespace lockstep::train {

namespace {

// All ranks use the main rank's times: with times of their own they would cut different stages.
std::vector<double> main_ranks_layer_times(models::LanguageModel& model, const TrainConfig& config,
                                           const ResolvedRun& run, const DistributedManager& dist) {
  std::vector<double> seconds = seconds_of_layers(
      model, run.batch.micro, config.data.sequence_length, autocast_of(config, dist.device()));
  if (!dist.is_main()) std::ranges::fill(seconds, 0.0);
  return dist.sum(std::move(seconds));
}

// The axes of ranks that work together on the same samples.
models::ModelAxes axes_of(const ParallelSection& parallel, DistributedManager& dist) {
  models::ModelAxes axes;
  if (parallel.tensor > 1)
    axes.tensor =
        std::make_shared<nn::TensorAxis>(dist.mesh().axis("tp"), dist.config().between_layers);
  if (parallel.context > 1) axes.context = dist.mesh().axis("cp");
  axes.context_algorithm = parallel.context_algorithm;
  return axes;
}

SpreadLanguageModel spread_model(
    const std::function<std::shared_ptr<models::LanguageModel>()>& make, const TrainConfig& config,
    const ResolvedRun& run, DistributedManager& dist,
    std::function<void(const pipeline::Timeline&)> on_timeline) {
  const ParallelSection& parallel = config.parallel;
  deferred::Construction construction;
  SpreadLanguageModel made{.model = construction.construct(make), .pipeline = nullptr};
  const auto& model = made.model;
  const bool is_timed = run.pipeline && parallel.balance == StageBalance::time;
  if (is_timed) {
    // Layers are timed before they are given to stages, so every rank makes all of them.
    construction.keep(model->parameters());
    model->to(dist.device());
  }
  model->spread(axes_of(parallel, dist));
  if (run.pipeline) {
    RunPipeline stages = *run.pipeline;
    if (is_timed)
      stages.layers = balanced_layers(main_ranks_layer_times(*model, config, run, dist),
                                      stages.schedule.num_stages());
    made.pipeline = std::make_unique<LanguageModelPipeline>(
        model, dist.mesh().axis("pp"), stages,
        LanguageModelPipelineOptions{.device = dist.device(),
                                     .micro_batch = run.batch.micro,
                                     .sequence_length = config.data.sequence_length,
                                     .autocast = autocast_of(config, dist.device()),
                                     .timeline_step = parallel.timeline_step,
                                     .on_timeline = std::move(on_timeline)});
  }
  construction.keep(model->parameters());
  construction.keep_all();
  dist.wrap_model(model);
  return made;
}

}  // namespace

SpreadLanguageModel make_language_model(
    const TrainConfig& config, const ResolvedRun& run, DistributedManager& dist,
    std::function<void(const pipeline::Timeline&)> on_timeline) {
  const models::ModelConfig& sizes = run.model;
  const auto make = [&] {
    const auto model = models::make_model(sizes, static_cast<std::uint64_t>(config.seed));
    if (config.recomputed_blocks > 0)
      SelectiveGradientCheckpointing(*model, config.recomputed_blocks);
    return model;
  };
  SpreadLanguageModel made;
  if (config.parallel.ranks_together() > 1)
    made = spread_model(make, config, run, dist, std::move(on_timeline));
  else
    made.model = takes_units(dist.config()) ? dist.build_model(make) : dist.wrap_model(make());
  if (config.model.from.empty()) return made;
  const auto& model = made.model;
  // The file is read into whole tensors beside the model's own, which may be cut.
  const std::vector<NamedTensor> weights = dist.full_state_dict(model);
  on_main_rank(dist, [&] {
    load_weights(sizes, weights, config.model.from);
    return std::string();
  });
  dist.load_full_state_dict(model, weights);
  return made;
}

}  // namespace lockstep::train
