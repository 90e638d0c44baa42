// Whether a run can go on from the checkpoint that its config leads to: found out without LibTorch
// and before any rank starts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/checkpoint/folder.h>
#include <lockstep/train/config.h>
#include <lockstep/train/plan.h>

namespace lockstep::train {

// Those that a later generation of a job goes on from, wherever the run began: the folder's, but
// for what is no newer than the checkpoint that the run was told to begin from. Ascending by step.
std::vector<checkpoint::Checkpoint> written_by_run(
    const std::filesystem::path& checkpoints, const std::optional<std::filesystem::path>& began);

// The checkpoint that the run goes on from, the newest that is not damaged as far as its files'
// names, sizes and beginnings tell; none where it starts from nothing. UsageError where the folder
// of the run has checkpoints that the run would get in the way of, or all of them are damaged.
std::optional<std::filesystem::path> checkpoint_to_resume(const TrainConfig& config,
                                                          int generation);

// UsageError where a run that begins after `step` finds checkpoints of later steps in its folder:
// the newest are kept, which would be those of the other run, and its own be lost.
void check_no_later_checkpoints(const std::filesystem::path& checkpoints, std::int64_t step);

// UsageError that names each thing in which the checkpoint's run is another one, or the file that
// is damaged, and the way out. Whether its tensors are as they were written is for whoever reads
// them. Returns what may differ and does, for whoever watches: "the learning rate is 0.001, was
// 0.01".
std::vector<std::string> check_resume(const TrainConfig& config, const RunPlan& plan,
                                      int generation = 0);

// UsageError where a checkpoint is not one of a language model of ours: a program's with a model of
// its own.
void check_is_language_model(const std::filesystem::path& checkpoint);

// The end of a sentence for whoever ended a run that has a checkpoint of that step.
std::string how_to_go_on(const TrainConfig& config, std::int64_t step);

}  // namespace lockstep::train
