// What a config means to the ranks of a job, once they run: how they share a model, what they
// compute in, and how they take steps.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/distributed/config.h>
#include <lockstep/distributed/rank_messages.h>
#include <lockstep/optim/schedules/loss_scale.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

DistributedConfig distributed_config(const TrainConfig& config);

// The type that operators compute in while weights keep theirs. If gradients are whole on each
// rank, so are weights, and a 16-bit precision is autocast's; if gradients are cut, it is the
// strategy's. CPUs compute in the type of the weights.
std::optional<c10::ScalarType> autocast_of(const TrainConfig& config, c10::Device device);

// The loss scale of a job whose gradients are in fp16 somewhere; nothing for the others.
std::optional<optim::LossScaleOptions> loss_scale_of(const TrainConfig& config, c10::Device device);

// Adds the leaves of a JSON text, as "model.hidden_size is 8", but for those that may differ
// between hosts: where files are, and how a rank loads and prints.
void add_config_lines(const std::string& json, const std::string& prefix,
                      std::vector<std::string>& lines);

// Every rank calls it. UsageError on all of them that names the keys whose values differ.
void check_same_config(const TrainConfig& config, const RankMessages& ranks);

}  // namespace lockstep::train
