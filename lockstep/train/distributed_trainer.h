// Trains any model, loop included, on any number of ranks:
//
//   auto dist = lockstep::setup_distributed();
//   lockstep::DistributedTrainer trainer(dist, [] { return MyNet(); }, torch::nn::MSELoss(),
//                                        {.epochs = 10});
//   trainer.fit(training_set, validation_set);
//
// and with a little more to say:
//
//   MyNet net;
//   dist.convert_sync_batchnorm(net);
//   lockstep::DistributedTrainer trainer(
//       dist, net, torch::nn::CrossEntropyLoss(),
//       {.epochs = 10, .batch_size = 64, .learning_rate = 1e-3, .output = "runs/digits"});
//   trainer.add_metric("accuracy", [](const torch::Tensor& output, const torch::Tensor& target) {
//     return output.argmax(1).eq(target).sum();
//   });
//   trainer.on_epoch([](const auto& epoch) { std::cout << epoch.loss << std::endl; });
//   const auto result = trainer.fit(training_set, validation_set);
//
// The loop may be the program's, too:
//
//   trainer.load_checkpoint("digits.checkpoint");
//   for (int epoch = 0; epoch < 10; ++epoch) {
//     const double loss = trainer.train_epoch(training_set).loss;
//     const double accuracy = trainer.evaluate(validation_set).metrics.at(0).value;
//   }
//   trainer.save_checkpoint("digits.checkpoint");
//   const torch::Tensor classes = trainer.predict(test_set).argmax(1);   // on the main rank
//
// FSDPTrainer does the same for a model that is cut among the ranks, in one line:
//
//   lockstep::FSDPTrainer trainer([] { return MyNet(); }, torch::nn::MSELoss(), {.epochs = 10});
//
// and in bf16, with the optimizer's state in the host's memory:
//
//   lockstep::FSDPTrainer trainer(
//       [] { return MyNet(); }, torch::nn::MSELoss(), {.epochs = 10},
//       {.sharding_strategy = lockstep::ShardingStrategy::FULL_SHARD,
//        .fsdp = {.mixed_precision = {.param_dtype = at::kBFloat16},
//                 .cpu_offload = {.offload_optimizer = true}}});
//
// DeepSpeedTrainer does it as a config of DeepSpeed's says:
//
//   lockstep::DeepSpeedTrainer trainer([] { return MyNet(); }, torch::nn::MSELoss(),
//                                      "ds_config.json", {.epochs = 10});
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/data/torch_dataset.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/parallel/pipeline/model_blocks.h>
#include <lockstep/train/engine_config.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/options.h>

namespace lockstep {

namespace train {

class Trainer;

// How DistributedTrainer::predict() goes about it.
struct PredictOptions {
  Weights weights = Weights::trained;
  bool on_all_ranks = false;
};

// A trainer as programs use it, but for the type of its model (DistributedTrainer says what its
// functions do). It is made at the first call, so that callbacks and metrics come before.
class TrainerHandle {
 public:
  using Dataset = std::shared_ptr<const data::Dataset>;
  using Output = std::function<at::Tensor(const data::Batch&)>;

  TrainerHandle(DistributedManager dist, std::shared_ptr<Task> task, TrainerOptions options);
  ~TrainerHandle();
  TrainerHandle(TrainerHandle&&) noexcept;
  TrainerHandle& operator=(TrainerHandle&&) noexcept;

  Callbacks& callbacks() { return *callbacks_; }

  TrainingResult fit(Dataset training, Dataset validation);
  EpochEnd train_epoch(Dataset training);
  Validation evaluate(const Dataset& dataset, Weights weights);
  at::Tensor predict(const Dataset& dataset, const Output& output, const PredictOptions& options);
  void save_checkpoint(const std::filesystem::path& folder);
  void load_checkpoint(const std::filesystem::path& folder);

 private:
  Trainer& trainer();

  DistributedManager dist_;
  std::shared_ptr<Task> task_;
  TrainerOptions options_;
  std::shared_ptr<Callbacks> callbacks_ = std::make_shared<Callbacks>();
  std::unique_ptr<Trainer> trainer_;
};

// The options that a config gives a trainer of a program's own model, for a number of ranks. What
// the program has itself, such as how long to train, is taken from `own`.
TrainerOptions with_config(TrainerOptions own, const EngineConfig& config,
                           const DistributedManager& dist);
DistributedConfig distributed_config_of(const EngineConfig& config);

// The axes of a job that no config describes.
ParallelSection parallel_of(const DistributedManager& dist);

// The stages of a trainer's model, as build_in_stages().
std::shared_ptr<ModulePipeline> stages_of_trainer(
    DistributedManager dist, const TrainerOptions& options, const ParallelSection& parallel,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make,
    const std::function<std::vector<pipeline::ModelBlock>()>& list_blocks);
// UsageError: only a function can make the model stage by stage.
[[noreturn]] void refuse_whole_model(const ParallelSection& parallel);

}  // namespace train

using train::EpochEnd;
using train::Judge;
using train::LearningRateScaling;
using train::LossReduction;
using train::PredictOptions;
using train::StepEnd;
using train::Then;
using train::TrainerOptions;
using train::TrainingResult;
using train::Validation;
using train::Weights;

// Every rank makes one with the same arguments and calls the same functions.
//
// Model: anything that DistributedManager::wrap_model takes, or a function that makes it. Its
// forward(Tensor) may return anything. A module by value is moved: if its constructor keeps `this`,
// pass [] { return MyNet(); } or a shared_ptr. Where the job has a pipeline it is such a function,
// of a Sequential or of a module with a member pipeline_blocks(), and no rank makes the whole
// model; the stages of a rank are in model(), whose own forward() throws. Loss: called with
// forward()'s result and the targets. It returns a scalar, which is a mean over the samples of the
// batch or, if `reduction` says so, a sum; or an nn::LossSum, which may count something other than
// samples. Either way it becomes the mean over the batch of all ranks. Datasets: a dataset of
// torch::data that gives an input and a target, or a shared_ptr<const data::Dataset>.
//
// Ownership: shares the model and the job. Threading: one thread. Failure: UsageError before the
// first step if something cannot work; train::TrainingStopped; the errors of checkpoints and
// communication.
template <typename Model>
class DistributedTrainer {
  using Shared = decltype(internal::share_model(std::declval<Model>()));
  using Task = train::ModelTask<Shared>;

 public:
  template <typename Loss>
  requires(!internal::PlainModule<Model>)
      DistributedTrainer(DistributedManager dist, Model model, Loss loss, TrainerOptions options,
                         LossReduction reduction = LossReduction::mean)
      : DistributedTrainer(dist, std::move(model), std::move(loss), std::move(options), reduction,
                           train::parallel_of(dist)) {}
  // Takes a module by value and moves it, as DistributedManager::wrap_model() does.
  template <typename Loss>
  requires internal::PlainModule<Model>
  [[deprecated("this moves the module: give std::make_shared<MyNet>(arguments...), which stays "
               "where it was constructed")]] DistributedTrainer(DistributedManager dist,
                                                                Model model, Loss loss,
                                                                TrainerOptions options,
                                                                LossReduction reduction =
                                                                    LossReduction::mean)
      : DistributedTrainer(dist, std::move(model), std::move(loss), std::move(options), reduction,
                           train::parallel_of(dist)) {}

  // Adds a metric of the validation set. It is called like the loss, without a graph, and returns a
  // sum over the samples of its batch, as a tensor or a number; the mean is reported.
  template <typename Metric>
  DistributedTrainer& add_metric(std::string name, Metric metric) {
    task_->add_metric(std::move(name), std::move(metric));
    return *this;
  }

  // Calls a function on every rank after each step, epoch or validation, with its StepEnd, EpochEnd
  // or Validation. It may return nothing, or a Then: Then::stop on any rank ends the training of
  // all ranks, with a checkpoint where there is a folder. A GPU's step is known one step later.
  template <typename Callback>
  DistributedTrainer& on_step(Callback callback) {
    trainer_.callbacks().on_step.push_back(answering<StepEnd>(std::move(callback)));
    return *this;
  }
  template <typename Callback>
  DistributedTrainer& on_epoch(Callback callback) {
    trainer_.callbacks().on_epoch.push_back(answering<EpochEnd>(std::move(callback)));
    return *this;
  }
  template <typename Callback>
  DistributedTrainer& on_validation(Callback callback) {
    trainer_.callbacks().on_validation.push_back(answering<train::Validation>(std::move(callback)));
    return *this;
  }

  // Trains as long as the options say. If the output folder holds a checkpoint, training goes on
  // from there, so a trainer with an output folder can fit only once. Without one, a second fit()
  // begins anew from the weights that there are; but after load_checkpoint() or train_epoch() it
  // goes on from there.
  template <typename Training>
  TrainingResult fit(Training training) {
    return trainer_.fit(data::as_dataset(std::move(training)), nullptr);
  }
  template <typename Training, typename ValidationData>
  TrainingResult fit(Training training, ValidationData validation) {
    return trainer_.fit(data::as_dataset(std::move(training)),
                        data::as_dataset(std::move(validation)));
  }

  // Trains on each sample once, or on those that load_checkpoint() found left of an epoch. Writes
  // no files.
  template <typename Training>
  EpochEnd train_epoch(Training training) {
    return trainer_.train_epoch(data::as_dataset(std::move(training)));
  }

  // The mean loss over a data set, of all ranks, and the metrics; NaN where nothing counts.
  template <typename Data>
  train::Validation evaluate(Data data, Weights weights = Weights::trained) {
    return trainer_.evaluate(data::as_dataset(std::move(data)), weights);
  }

  // The model's outputs for all samples, [samples, …] in the data set's order, in the host's memory
  // of the main rank, or of all; the other ranks get an undefined tensor. forward() returns a
  // tensor with a row for each sample, or `head` makes one of what it returns.
  template <typename Data>
  at::Tensor predict(Data data, const PredictOptions& options = {}) {
    static_assert(std::is_same_v<typename Task::Output, at::Tensor>,
                  "forward() does not return a tensor: give predict() a function that makes one of "
                  "what it returns");
    return predict(
        std::move(data), [](const at::Tensor& output) { return output; }, options);
  }
  template <typename Data, typename Head>
  requires std::is_invocable_r_v<at::Tensor, Head&, const typename Task::Output&> at::Tensor
  predict(Data data, Head head, const PredictOptions& options = {}) {
    return trainer_.predict(
        data::as_dataset(std::move(data)),
        [&](const data::Batch& batch) -> at::Tensor { return head(task_->output(batch)); },
        options);
  }

  // Writes model, optimizer, schedule, averaged weights and the place in the data into a folder, in
  // place of what it had; and goes on from there, also with other ranks or another strategy. The
  // folder may be one that fit() has written, such as TrainingResult::best_checkpoint.
  void save_checkpoint(const std::filesystem::path& folder) { trainer_.save_checkpoint(folder); }
  void load_checkpoint(const std::filesystem::path& folder) { trainer_.load_checkpoint(folder); }

  // The job, for everything else that a program may need: ranks, whole weights.
  DistributedManager& dist() { return dist_; }

  // The model, in its own type; a module that was passed by value is a shared_ptr here.
  const Shared& model() const { return task_->typed_model(); }

 protected:
  // With the axes of a config.
  template <typename Loss>
  DistributedTrainer(DistributedManager dist, Model model, Loss loss, TrainerOptions options,
                     LossReduction reduction, const train::ParallelSection& parallel)
      : DistributedTrainer(
            dist, options,
            make_task(dist, std::move(model), std::move(loss), options, reduction, parallel)) {}

 private:
  DistributedTrainer(DistributedManager dist, TrainerOptions options, std::shared_ptr<Task> task)
      : dist_(dist), task_(task), trainer_(std::move(dist), std::move(task), std::move(options)) {}

  template <typename Loss>
  static std::shared_ptr<Task> make_task(const DistributedManager& dist, Model model, Loss loss,
                                         const TrainerOptions& options, LossReduction reduction,
                                         const train::ParallelSection& parallel) {
    if (parallel.pipeline == 1)
      return std::make_shared<Task>(internal::share_model(std::move(model)), std::move(loss),
                                    reduction);
    if constexpr (internal::ModelFactory<Model>) {
      std::optional<Shared> made;
      auto stages = train::stages_of_trainer(
          dist, options, parallel,
          [&] {
            made.emplace(internal::made_in_place(std::move(model)));
            return internal::module_of(*made);
          },
          [&] { return pipeline::listed_blocks(*made, internal::module_of(*made)); });
      return std::make_shared<Task>(*std::move(made), std::move(loss), reduction,
                                    std::move(stages));
    } else {
      train::refuse_whole_model(parallel);
    }
  }

  template <typename Event, typename Callback>
  static std::function<Then(const Event&)> answering(Callback callback) {
    return [callback = std::move(callback)](const Event& event) mutable {
      if constexpr (std::is_void_v<std::invoke_result_t<Callback&, const Event&>>) {
        callback(event);
        return Then::go_on;
      } else {
        return callback(event);
      }
    };
  }

  DistributedManager dist_;
  std::shared_ptr<Task> task_;
  train::TrainerHandle trainer_;
};

// A DistributedTrainer of a job with ParallelMode::FSDP, which it joins by itself or is given.
template <typename Model>
class FSDPTrainer : public DistributedTrainer<Model> {
 public:
  // Whatever mode the config has, it is FSDP's.
  template <typename Loss>
  FSDPTrainer(Model model, Loss loss, TrainerOptions options, DistributedConfig config = {},
              LossReduction reduction = LossReduction::mean)
      : DistributedTrainer<Model>(join(std::move(config)), std::move(model), std::move(loss),
                                  std::move(options), reduction) {}

  // UsageError where the job is not one of FSDP.
  template <typename Loss>
  FSDPTrainer(DistributedManager dist, Model model, Loss loss, TrainerOptions options,
              LossReduction reduction = LossReduction::mean)
      : DistributedTrainer<Model>(checked(std::move(dist)), std::move(model), std::move(loss),
                                  std::move(options), reduction) {}

 private:
  static DistributedManager join(DistributedConfig config) {
    config.mode = ParallelMode::FSDP;
    return setup_distributed(config);
  }

  static DistributedManager checked(DistributedManager dist) {
    if (dist.config().mode != ParallelMode::FSDP)
      throw UsageError("an FSDPTrainer was given a job of {}: set the job up with "
                       ".mode = ParallelMode::FSDP, or take a DistributedTrainer, which trains in "
                       "any mode",
                       name_of(dist.config().mode));
    return dist;
  }
};

// A DistributedTrainer that a config describes, as DeepSpeed's or docs/config.md: its strategy,
// batch, optimizer, schedule, precision, folder and checkpoints replace those of the options, which
// say what it does not (docs/trainer.md). Without a pipeline every rank makes the whole model
// first.
template <typename Model>
class DeepSpeedTrainer : public DistributedTrainer<Model> {
 public:
  template <typename Loss>
  DeepSpeedTrainer(Model model, Loss loss, const EngineConfig& config, TrainerOptions options = {},
                   LossReduction reduction = LossReduction::mean)
      : DeepSpeedTrainer(setup_distributed(train::distributed_config_of(config)), std::move(model),
                         std::move(loss), config, std::move(options), reduction) {}

 private:
  template <typename Loss>
  DeepSpeedTrainer(DistributedManager dist, Model model, Loss loss, const EngineConfig& config,
                   TrainerOptions options, LossReduction reduction)
      : DistributedTrainer<Model>(dist, std::move(model), std::move(loss),
                                  train::with_config(std::move(options), config, dist), reduction,
                                  config.values().parallel) {}
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::DeepSpeedTrainer;

using lockstep::DistributedTrainer;
using lockstep::EpochEnd;
using lockstep::FSDPTrainer;
using lockstep::Judge;
using lockstep::LearningRateScaling;
using lockstep::LossReduction;
using lockstep::StepEnd;
using lockstep::Then;
using lockstep::TrainerOptions;
using lockstep::TrainingResult;
using lockstep::Weights;

}  // namespace lockstep::names
