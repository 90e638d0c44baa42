#include <lockstep/train/run_start.h>

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/is_there.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/checkpoint/training_state_json.h>

namespace lockstep::train {

namespace {

constexpr std::uint64_t kLargestStart = 1 << 24;
constexpr int kStartDepth = 4;

std::filesystem::path start_file(const std::filesystem::path& output) {
  return output / "start.json";
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

}  // namespace lockstep::train
