// Whether a run can go on from the checkpoint that its config leads to: found out without LibTorch
// and before any rank starts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/base/folder_lock.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/training_state.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::train {

// What a run was told to begin from.
struct Beginning {
  Resume resume = Resume::automatic;
  std::filesystem::path from = {};
};

// The checkpoints in a run's folder that it may go on from, ascending by step. One that a
// generation of its job before has begun, in the state `start` (run_start.h), goes on from what it
// has written since, wherever it began. UsageError where one that begins now finds checkpoints of
// later steps than its first: the newest are kept, which would be those of the other run, and its
// own be lost.
std::vector<checkpoint::Checkpoint> to_go_on_from(
    const std::filesystem::path& output, const Beginning& told,
    const std::optional<checkpoint::TrainingState>& start);

// For a run that finds none of them whole, before it begins where it was told to: UsageError where
// later steps have been saved in its folder. Whatever has become of those checkpoints (damaged, set
// aside, removed), steps that were trained are not trained again without a word; a folder of its
// own is how a user says that a run is a new one.
void check_nothing_lost(const std::filesystem::path& output, const Beginning& told,
                        const std::optional<checkpoint::TrainingState>& start);

// The step of the run's newest checkpoint where that is gone (removed, or on a disk that is not
// mounted): its folder has neither that one nor a later one, with damaged and set aside ones
// counted. UsageError where saved.json cannot be read.
std::optional<std::int64_t> newest_is_gone(const std::filesystem::path& output);

// The checkpoint that the run goes on from in the generation `now`, the newest that is not damaged
// as far as its files' names, sizes and beginnings tell; none where it starts from nothing.
// UsageError as both above.
std::optional<std::filesystem::path> checkpoint_to_resume(const TrainConfig& config,
                                                          const FolderHolder& now);

// UsageError that names each thing in which the checkpoint's run is another one, or the file that
// is damaged, and the way out. Whether its tensors are as they were written is for whoever reads
// them. Returns what may differ and does, for whoever watches: "the learning rate is 0.001, was
// 0.01".
std::vector<std::string> check_resume(const TrainConfig& config, const ResolvedRun& run,
                                      const FolderHolder& now = {});

// The end of a sentence for whoever ended a run that has a checkpoint of that step.
std::string how_to_go_on(const TrainConfig& config, std::int64_t step);

}  // namespace lockstep::train
