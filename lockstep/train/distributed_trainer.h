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
//   const auto result = trainer.fit(training_set, validation_set);
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
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/data/torch_dataset.h>
#include <lockstep/distributed/any_model.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/train/model_task.h>
#include <lockstep/train/options.h>

namespace lockstep {

namespace train {

// Trains a task as the options say; `validation` may be null. Every rank calls it, with the same
// arguments. DistributedTrainer makes the task of a model and a loss.
TrainingResult run_training(DistributedManager dist, std::shared_ptr<Task> task,
                            std::shared_ptr<const data::Dataset> training,
                            std::shared_ptr<const data::Dataset> validation,
                            TrainerOptions options);

}  // namespace train

using train::LearningRateScaling;
using train::LossReduction;
using train::TrainerOptions;
using train::TrainingResult;

// Every rank makes one with the same arguments and calls the same functions.
//
// Model: anything that DistributedManager::wrap_model takes, or a function that makes it. Its
// forward(Tensor) may return anything. A module by value is moved: if its constructor keeps `this`,
// pass [] { return MyNet(); } or a shared_ptr. Loss: called with forward()'s result and the
// targets. It returns a scalar, which is a mean over the samples of the batch or, if `reduction`
// says so, a sum; or an nn::LossSum, which may count something other than samples. Either way it
// becomes the mean over the batch of all ranks. Datasets: a dataset of torch::data that gives an
// input and a target, or a shared_ptr<const data::Dataset>.
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
      : DistributedTrainer(std::move(dist), std::move(options),
                           std::make_shared<Task>(internal::share_model(std::move(model)),
                                                  std::move(loss), reduction)) {}
  // Takes a module by value and moves it, as DistributedManager::wrap_model() does.
  template <typename Loss>
  requires internal::PlainModule<Model>
  [[deprecated("this moves the module: give std::make_shared<MyNet>(arguments...), which stays "
               "where it was constructed")]] DistributedTrainer(DistributedManager dist,
                                                                Model model, Loss loss,
                                                                TrainerOptions options,
                                                                LossReduction reduction =
                                                                    LossReduction::mean)
      : DistributedTrainer(std::move(dist), std::move(options),
                           std::make_shared<Task>(internal::share_model(std::move(model)),
                                                  std::move(loss), reduction)) {}

  // Adds a metric of the validation set. It is called like the loss, without a graph, and returns a
  // sum over the samples of its batch, as a tensor or a number; the mean is reported.
  template <typename Metric>
  DistributedTrainer& add_metric(std::string name, Metric metric) {
    task_->add_metric(std::move(name), std::move(metric));
    return *this;
  }

  // Trains as long as the options say. If the output folder holds a checkpoint, training goes on
  // from there, so a trainer with an output folder can fit only once.
  template <typename Training>
  TrainingResult fit(Training training) {
    return run(data::as_dataset(std::move(training)), nullptr);
  }
  template <typename Training, typename Validation>
  TrainingResult fit(Training training, Validation validation) {
    return run(data::as_dataset(std::move(training)), data::as_dataset(std::move(validation)));
  }

  // The job, for everything else that a program may need: ranks, whole weights.
  DistributedManager& dist() { return dist_; }

  // The model, in its own type; a module that was passed by value is a shared_ptr here.
  const Shared& model() const { return task_->typed_model(); }

 private:
  DistributedTrainer(DistributedManager dist, TrainerOptions options, std::shared_ptr<Task> task)
      : dist_(std::move(dist)), options_(std::move(options)), task_(std::move(task)) {}

  using Dataset = std::shared_ptr<const data::Dataset>;

  TrainingResult run(Dataset training, Dataset validation) {
    return train::run_training(dist_, task_, std::move(training), std::move(validation), options_);
  }

  DistributedManager dist_;
  TrainerOptions options_;
  std::shared_ptr<Task> task_;
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

}  // namespace lockstep

namespace lockstep::names {

using lockstep::DistributedTrainer;
using lockstep::FSDPTrainer;
using lockstep::LearningRateScaling;
using lockstep::LossReduction;
using lockstep::TrainerOptions;
using lockstep::TrainingResult;

}  // namespace lockstep::names
