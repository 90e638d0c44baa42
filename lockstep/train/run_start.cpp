#include <lockstep/train/run_start.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/is_there.h>
#include <lockstep/checkpoint/folder.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/checkpoint/training_state_json.h>

namespace lockstep::train {

namespace {

constexpr std::uint64_t kLargestStart = 1 << 24;
constexpr int kStartDepth = 4;

std::filesystem::path start_file(const std::filesystem::path& output) {
  return output / "start.json";
}

std::filesystem::path saved_file(const std::filesystem::path& output) {
  return output / "saved.json";
}

}  // namespace

void write_start(const std::filesystem::path& output, const FolderHolder& begun_by,
                 const checkpoint::TrainingState& state) {
  const nlohmann::ordered_json root = {
      {"job", begun_by.job},
      {"generation", begun_by.generation},
      {"state", nlohmann::ordered_json::parse(checkpoint::to_text(state))}};
  write_durably(start_file(output), root.dump());
}

std::optional<checkpoint::TrainingState> begun_before(const std::filesystem::path& output,
                                                      const FolderHolder& now) {
  const std::filesystem::path path = start_file(output);
  if (now.generation == 0 || !is_there(path)) return std::nullopt;
  const std::string name = path.string();
  const nlohmann::json root =
      checkpoint::parse_strictly(checkpoint::read_text(path, kLargestStart), name, kStartDepth);
  const checkpoint::JsonPlace top(name, root);
  if (top.at("job").text() != now.job || top.at("generation").integer<int>(0) > now.generation)
    return std::nullopt;
  return checkpoint::state_at(top.at("state"));
}

void note_saved(const std::filesystem::path& output, std::int64_t step) {
  if (is_there(saved_file(output))) return;
  write_durably(saved_file(output), nlohmann::ordered_json{{"step", step}}.dump());
}

std::optional<std::int64_t> saved_before(const std::filesystem::path& output) {
  std::optional<std::int64_t> step;
  if (const std::filesystem::path path = saved_file(output); is_there(path)) {
    const std::string name = path.string();
    const nlohmann::json root =
        checkpoint::parse_strictly(checkpoint::read_text(path, kLargestStart), name, kStartDepth);
    step = checkpoint::JsonPlace(name, root).at("step").integer<std::int64_t>(0);
  }
  for (const auto& list : {checkpoint::list_checkpoints, checkpoint::list_set_aside})
    for (const checkpoint::Checkpoint& one : list(output / "checkpoints"))
      step = std::max(step.value_or(0), one.step);
  return step;
}

}  // namespace lockstep::train
