// What a config means to the ranks of a job, once they run: how they share a model, what they
// compute in and with how many threads, and how they take steps.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/distributed/config.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/options.h>

namespace lockstep::train {

DistributedConfig distributed_config(const TrainConfig& config);

// The type that operators compute in while weights keep theirs. If gradients are whole on each
// rank, so are weights, and a 16-bit precision is autocast's; if gradients are cut, it is the
// strategy's. CPUs compute in the type of the weights.
std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device);

// The loss scale of a job whose gradients are in fp16 somewhere; nothing for the others.
std::optional<optim::LossScaleOptions> loss_scale_of(const TrainConfig& config, c10::Device device);

// The options of a trainer, but for the batch and the schedule's length, which depend on the number
// of ranks and on the data.
TrainerOptions trainer_options(const TrainConfig& config, c10::Device device);

// The batch with which a run began that goes on now: the main rank is asked, which sees the run's
// folder.
std::optional<BegunBatch> begun_batch_of_job(const TrainConfig& config,
                                             const DistributedManager& dist);

// Makes a program's own model and spreads it over the ranks. Random numbers are seeded before
// `make` is called. Where parameters are cut, no rank ever holds more than a part of them, unless
// layers are cut, too, or batch norms take their statistics over the samples of all ranks.
enum class BatchNorms { of_a_rank, of_all_ranks };
std::shared_ptr<torch::nn::Module> spread_model(
    DistributedManager& dist, const TrainConfig& config,
    const std::function<std::shared_ptr<torch::nn::Module>()>& make, BatchNorms batch_norms);

// Adds the leaves of a JSON text, as "model.hidden_size is 8", but for those that may differ
// between hosts: where files are, and how a rank loads and prints.
void add_config_lines(const std::string& json, const std::string& prefix,
                      std::vector<std::string>& lines);

// Every rank calls it. UsageError on all of them that names the keys whose values differ.
void check_same_config(const TrainConfig& config, const RankMessages& ranks);

// A rank's share of its cores. For each core that the rank may use, `num_users` has the number of
// the host's ranks that may use it, this rank included. If a cgroup lets this process use fewer
// cores (`num_usable`), the ranks of the host divide those. At least 1.
int share_of_cores(const std::vector<double>& num_users, int num_usable, int num_local_ranks);

// The config's number, or else OMP_NUM_THREADS, or else this rank's share of the cores: all cores
// that the launcher bound it to, or the host's divided among its ranks. All ranks call it together.
int num_threads(std::int64_t threads_per_rank, const DistributedManager& dist);

}  // namespace lockstep::train
