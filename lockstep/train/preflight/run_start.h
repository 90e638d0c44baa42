// Files in a run's folder that say that it has begun, with which batch, and that it has saved.
// Later generations of its job read them, and so does a run that is started again.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

// Leaves `start.json` in the run's folder: for the generation that begins the run, before its first
// step, once what others have left in the folder is known not to be in the way.
void write_start(const std::filesystem::path& output, const FolderHolder& begun_by,
                 const checkpoint::TrainingState& state);

// The state that the run began in which `now` is to go on with, as a generation of its job before
// it has begun it. Nothing where none has: that there were some does not tell, as they may have
// been lost before they came to this folder. Jobs that their launcher does not name, or one after
// the other by the same name and secret file, cannot be told apart. UsageError where the file
// cannot be read.
std::optional<checkpoint::TrainingState> begun_before(const std::filesystem::path& output,
                                                      const FolderHolder& now);

// Leaves the steps of the run's first checkpoint and of this one, which is complete, in
// `saved.json` in its folder: the file outlives the checkpoints. FileError; CommError where a later
// generation of the job has taken over the folder, which `lock` holds.
void note_saved(const std::filesystem::path& output, std::int64_t step, const FolderLock& lock);

// The step that note_saved() was last called with; nothing where there is no such file. UsageError
// where it cannot be read.
std::optional<std::int64_t> saved_last(const std::filesystem::path& output);

// The step of a checkpoint that was saved in the run's folder, whatever has become of it: the
// latest that is there or was set aside, or else the first. UsageError as above.
std::optional<std::int64_t> saved_before(const std::filesystem::path& output);

// Writes the batch that a run began with, which it keeps on other numbers of ranks, into the values
// of a checkpoint::TrainingState.
void put(const BegunBatch& begun, std::map<std::string, double>& values);
// Reads it back; nothing where there is none that makes sense.
std::optional<BegunBatch> begun_in(const std::map<std::string, double>& values);

// The batch with which the config's run began: from the checkpoint that it resumes from or, where a
// generation of the job before `now` has begun it, from the state that it began in. Nothing where
// the run begins now or asks for another batch, or where the files cannot be read, which
// check_resume() reports.
std::optional<BegunBatch> begun_batch(const TrainConfig& config, const FolderHolder& now);

}  // namespace lockstep::train
