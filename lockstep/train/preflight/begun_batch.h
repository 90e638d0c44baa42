// The batch that a run began with, where it goes on: on other ranks it is still that.
#pragma once

#include <map>
#include <optional>
#include <string>

#include <lockstep/base/folder_lock.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

// Among the values of a checkpoint::TrainingState.
void put(const BegunBatch& begun, std::map<std::string, double>& values);
// Nothing where there is none that makes sense.
std::optional<BegunBatch> begun_in(const std::map<std::string, double>& values);

// The batch of the run that the config leads to: by the checkpoint that it goes on from or, where a
// generation of the job before `now` has begun it, by the state that it began in. Nothing where it
// begins now, asks for another batch than it did, or what is there cannot be read, which
// check_resume() tells.
std::optional<BegunBatch> begun_batch(const TrainConfig& config, const FolderHolder& now);

}  // namespace lockstep::train
