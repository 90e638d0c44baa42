// A whole checkpoint of a run: what is in the folder, written and read in one call.
//
//   step-00000500/
//     model.safetensors      the weights; with config.json what Hugging Face's tools load
//     optimizer.safetensors  where there is an optimizer
//     rng.safetensors        the random number generators
//     config.json, …         texts that the caller adds
//     state.json             TrainingState, and the sizes and checksums of the other files
#pragma once

#include <filesystem>
#include <map>
#include <span>
#include <string>

#include <lockstep/checkpoint/tensors.h>
#include <lockstep/checkpoint/training_state.h>

namespace lockstep::checkpoint {

inline constexpr const char* kOptimizerFile = "optimizer.safetensors";
inline constexpr const char* kGeneratorFile = "rng.safetensors";

struct CheckpointContents {
  std::span<const NamedTensor> model = {};
  std::span<const NamedTensor> optimizer = {};
  TrainingState state = {};                       // its step names the checkpoint
  std::map<std::string, std::string> files = {};  // file name to text: config.json
  StoredForms stored = {};                        // of the model's tensors
};

// One process writes; the others wait for it (a barrier is the caller's). Returns where it is,
// which is when all of it is on disk. Old checkpoints are kept: remove_old() is for after. Failure:
// as CheckpointWriter and save_tensors; also FileError with the numbers, before anything is
// written, where the disk has not room for all of it.
std::filesystem::path save_checkpoint(const std::filesystem::path& run_folder,
                                      const CheckpointContents& contents);

// Only looks, and throws the UsageErrors that save_checkpoint would: for before a run computes what
// it could not save.
void check_contents(const CheckpointContents& contents);

// state.json and the generators, once every file has its size and checksum. Allocates nothing on a
// device: for looking at a checkpoint before the model exists (its config is in the state).
// UsageError that says what is damaged or missing.
TrainingState load_state(const std::filesystem::path& checkpoint);

// All of it: into the model's and the optimizer's tensors, without a conversion, so that the run
// continues to the bit. The generators are in the state; restore_generators() sets them. Nothing is
// touched unless both fit.
TrainingState load_checkpoint(const std::filesystem::path& checkpoint,
                              std::span<const NamedTensor> model,
                              std::span<const NamedTensor> optimizer,
                              const StoredForms& stored = {});

}  // namespace lockstep::checkpoint
