// Checkpoints as tables and as JSON.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/checkpoint/format/reader.h>

namespace lockstep::cli {

// A run's checkpoints, a line each; damaged ones say so.
std::string checkpoint_list(const std::filesystem::path& checkpoints);
std::string checkpoint_list_json(const std::filesystem::path& checkpoints);

enum class Tensors { counted, listed };

std::string checkpoint_text(const checkpoint::CheckpointReader& reader, Tensors tensors);
std::string checkpoint_json(const checkpoint::CheckpointReader& reader);

// A sentence for each key in which the two differ as config.json describes their models.
std::vector<std::string> config_differences(checkpoint::CheckpointReader& first,
                                            checkpoint::CheckpointReader& second);

}  // namespace lockstep::cli
