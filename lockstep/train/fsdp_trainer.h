// Trains a model that is cut among the ranks, in one line where a DistributedTrainer needs two:
//
//   lockstep::FSDPTrainer trainer([] { return MyNet(); }, torch::nn::MSELoss(), {.epochs = 10});
//   trainer.fit(training_set, validation_set);
//
// and in bf16, with the optimizer's state in the host's memory:
//
//   lockstep::FSDPTrainer trainer(
//       [] { return MyNet(); }, torch::nn::MSELoss(), {.epochs = 10},
//       {.sharding_strategy = lockstep::ShardingStrategy::FULL_SHARD,
//        .fsdp = {.mixed_precision = {.param_dtype = at::kBFloat16},
//                 .cpu_offload = {.offload_optimizer = true}}});
#pragma once

#include <utility>

#include <lockstep/base/error.h>
#include <lockstep/train/distributed_trainer.h>

namespace lockstep {

// A DistributedTrainer for a job with ParallelMode::FSDP, which it joins by itself or is given.
template <typename Model>
class FSDPTrainer : public DistributedTrainer<Model> {
 public:
  // Joins the job in ParallelMode::FSDP, whatever mode the config has.
  template <typename Loss>
  FSDPTrainer(Model model, Loss loss, TrainerOptions options, DistributedConfig config = {},
              LossReduction reduction = LossReduction::mean)
      : DistributedTrainer<Model>(join(std::move(config)), std::move(model), std::move(loss),
                                  std::move(options), reduction) {}

  // UsageError if the job's mode is not ParallelMode::FSDP.
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
      throw UsageError("an FSDPTrainer was given a job of DDP, whose ranks hold the whole model: "
                       "set it up with ParallelMode::FSDP, or take a DistributedTrainer");
    return dist;
  }
};

}  // namespace lockstep

namespace lockstep::names {

using lockstep::FSDPTrainer;

}  // namespace lockstep::names
