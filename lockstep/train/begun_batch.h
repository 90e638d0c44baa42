// The batch that a run began with, where it goes on: on other ranks it is still that.
#pragma once

#include <map>
#include <optional>
#include <string>

#include <lockstep/train/config.h>
#include <lockstep/train/config/batch.h>

namespace lockstep::train {

// Among the values of a checkpoint::TrainingState.
void put(const BegunBatch& begun, std::map<std::string, double>& values);
// Nothing where there is none that makes sense.
std::optional<BegunBatch> begun_in(const std::map<std::string, double>& values);

// The state in which a run that has a folder begins, for generations of its job that find no
// checkpoint yet.
std::filesystem::path start_file(const std::filesystem::path& output);

// Of the run that the config leads to: by the checkpoint that it goes on from or, in a later
// generation of a job, by the file of its start. Nothing where it begins now, asks for another
// batch than it did, or what is there cannot be read, which check_resume() tells.
std::optional<BegunBatch> begun_batch(const TrainConfig& config, int generation);

}  // namespace lockstep::train
