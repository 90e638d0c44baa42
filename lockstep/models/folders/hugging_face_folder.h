// Language models in folders: checkpoints of ours, folders of Hugging Face's, and one made of the
// other.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/models/spec/config.h>

namespace lockstep::checkpoint {
class CheckpointReader;
}

namespace lockstep::models {

// The config of the model in a folder, after a check that its tensors are those that its
// config.json describes, none missing and none besides. The config.json of a checkpoint is compared
// with the manifest, that of an exported model with lockstep-hashes.json; other folders of Hugging
// Face's have no hashes. UsageError that names the tensors and their shapes where they do not fit,
// or for a checkpoint of another model or program; else as CheckpointReader and SafetensorsFolder.
ModelConfig read_model_config(const std::filesystem::path& folder);
ModelConfig read_model_config(checkpoint::CheckpointReader& checkpoint);

struct ExportOptions {
  // The most bytes of tensors in a file; a larger tensor has a file of its own.
  std::uint64_t largest_file = 5'000'000'000;
};

// Writes config.json and the weights, in one model.safetensors or several with an index, as the
// transformers library reads them: its names, its transposes; and lockstep-hashes.json, by which
// our readers find damage. Holds one tensor in memory at a time. Makes the folder, which must not
// hold a model. Returns the files. UsageError for a checkpoint of another model or program, and as
// CheckpointReader; FileError.
std::vector<std::string> export_to_hugging_face(checkpoint::CheckpointReader& reader,
                                                const std::filesystem::path& folder,
                                                const ExportOptions& options = {});

// The reverse: a checkpoint of step 0 in `run_folder`, of the weights alone, for model.from and
// `lockstep sample`. Returns where it is. UsageError as read_model_config(), and for a `run_folder`
// that has a checkpoint already.
std::filesystem::path import_from_hugging_face(const std::filesystem::path& folder,
                                               const std::filesystem::path& run_folder);

}  // namespace lockstep::models
