#include <lockstep/train/distributed_trainer.h>

#include <lockstep/train/config/batch.h>
#include <lockstep/train/job_config.h>
#include <lockstep/train/module_pipeline.h>
#include <lockstep/train/trainer.h>

namespace lockstep::train {

TrainerHandle::TrainerHandle(DistributedManager dist, std::shared_ptr<Task> task,
                             TrainerOptions options)
    : dist_(std::move(dist)), task_(std::move(task)), options_(std::move(options)) {}

TrainerHandle::~TrainerHandle() = default;
TrainerHandle::TrainerHandle(TrainerHandle&&) noexcept = default;
TrainerHandle& TrainerHandle::operator=(TrainerHandle&&) noexcept = default;

Trainer& TrainerHandle::trainer() {
  if (trainer_ == nullptr) trainer_ = std::make_unique<Trainer>(dist_, task_, options_, callbacks_);
  return *trainer_;
}

TrainingResult TrainerHandle::fit(Dataset training, Dataset validation) {
  return trainer().fit(std::move(training), std::move(validation));
}

EpochEnd TrainerHandle::train_epoch(Dataset training) {
  return trainer().train_epoch(std::move(training));
}

Validation TrainerHandle::evaluate(const Dataset& dataset, Weights weights) {
  return trainer().evaluate(dataset, weights);
}

at::Tensor TrainerHandle::predict(const Dataset& dataset, const Output& output,
                                  const PredictOptions& options) {
  return trainer().predict(
      dataset, output, options.weights,
      options.on_all_ranks ? Trainer::Where::all_ranks : Trainer::Where::main_rank);
}

void TrainerHandle::save_checkpoint(const std::filesystem::path& folder) {
  trainer().save_checkpoint(folder);
}

void TrainerHandle::load_checkpoint(const std::filesystem::path& folder) {
  trainer().load_checkpoint(folder);
}

ParallelSection parallel_of(const DistributedManager& dist) {
  const auto& [tensor, pipeline, context] = dist.config().model_parallel;
  ParallelSection parallel;
  parallel.tensor = tensor;
  parallel.pipeline = pipeline;
  parallel.context = context;
  return parallel;
}

std::shared_ptr<ModulePipeline> stages_of_trainer(
    DistributedManager dist, const TrainerOptions& options, const ParallelSection& parallel,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make,
    const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks) {
  check(options);
  return build_in_stages(dist, make, list_blocks,
                         {.parallel = parallel,
                          .num_micro_batches = asked_batch(options, dist.data_size()).accumulation,
                          .autocast = options.autocast});
}

void refuse_whole_model(const ParallelSection& parallel) {
  throw UsageError("the pipeline has {} ranks, and the trainer was given a model that is made "
                   "already, which every rank would hold whole: give it a function that makes the "
                   "model, such as [] {{ return MyNet(); }}",
                   parallel.pipeline);
}

DistributedConfig distributed_config_of(const EngineConfig& config) {
  return distributed_config(config.values());
}

TrainerOptions with_config(TrainerOptions own, const EngineConfig& config,
                           const DistributedManager& dist) {
  const TrainConfig& values = config.values();
  TrainerOptions options = trainer_options(values, dist.device());
  const Batch batch = resolve_batch(values, dist.data_size());
  options.batch_size = batch.micro;
  // A step that the config gives as so much of each rank keeps its samples on other ranks.
  if (values.batch.global || values.elasticity)
    options.samples_per_step = batch.global;
  else
    options.accumulation = batch.accumulation;
  // A config of DeepSpeed's does not say how long to train.
  if (!options.max_steps && !options.epochs) {
    options.max_steps = own.max_steps;
    options.epochs = own.epochs;
  }
  if (options.max_steps) options.schedule.set_length(*options.max_steps);
  if (values.output.empty()) {
    options.output = own.output;
    options.checkpoint_interval = own.checkpoint_interval;
    options.keep_checkpoints = own.keep_checkpoints;
    options.asynchronous_checkpoints = own.asynchronous_checkpoints;
    options.resume = own.resume;
    options.resume_from = own.resume_from;
    options.csv = own.csv;
    options.tensorboard = own.tensorboard;
    options.csv_folder = own.csv_folder;
    options.tensorboard_folder = own.tensorboard_folder;
  }
  options.shuffle = own.shuffle;
  options.validation_interval = own.validation_interval;
  options.validation_batches = own.validation_batches;
  options.validation_weights = own.validation_weights;
  options.judge = own.judge;
  options.patience = own.patience;
  options.keep_best = own.keep_best;
  options.ema_decay = own.ema_decay;
  options.memory_interval = own.memory_interval;
  options.peer_copies = own.peer_copies;
  options.flops_per_unit = own.flops_per_unit;
  options.progress_fd = own.progress_fd;
  options.title = own.title;
  options.reference_loss = own.reference_loss;
  return options;
}

}  // namespace lockstep::train
