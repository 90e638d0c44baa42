#include <lockstep/train/preflight/run_start.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include <spdlog/fmt/fmt.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/file.h>
#include <lockstep/base/hash.h>
#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>

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

std::uint64_t hash_of(const FolderHolder& begun_by, const std::string& state_text) {
  return hash_text(fmt::format("{}\n{}\n{}", begun_by.job, begun_by.generation, state_text));
}

}  // namespace

void write_start(const std::filesystem::path& output, const FolderHolder& begun_by,
                 const checkpoint::TrainingState& state) {
  const std::string state_text = checkpoint::to_text(state);
  const nlohmann::ordered_json root = {{"job", begun_by.job},
                                       {"generation", begun_by.generation},
                                       {"state", nlohmann::ordered_json::parse(state_text)},
                                       {"hash", hash_of(begun_by, state_text)}};
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
  const FolderHolder begun_by{.job = top.at("job").text(),
                              .generation = top.at("generation").integer<int>(0)};
  checkpoint::TrainingState state = checkpoint::state_at(top.at("state"));
  if (top.at("hash").integer<std::uint64_t>() != hash_of(begun_by, checkpoint::to_text(state)))
    throw UsageError(
        "'{}' is damaged: its hash is that of another text. It says how the run began; "
        "remove it to go on from the newest checkpoint as a run of its own",
        name);
  if (begun_by.job != now.job || begun_by.generation > now.generation) return std::nullopt;
  return state;
}

namespace {

// What saved.json has: the steps of two checkpoints.
struct Saved {
  std::int64_t first = 0;
  std::int64_t last = 0;
};

std::optional<Saved> read_saved(const std::filesystem::path& output) {
  const std::filesystem::path path = saved_file(output);
  if (!is_there(path)) return std::nullopt;
  const std::string name = path.string();
  const nlohmann::json root =
      checkpoint::parse_strictly(checkpoint::read_text(path, kLargestStart), name, kStartDepth);
  const checkpoint::JsonPlace top(name, root);
  Saved saved{.first = top.at("step").integer<std::int64_t>(0)};
  // Earlier versions of Lockstep wrote only the first.
  saved.last = root.contains("last") ? top.at("last").integer<std::int64_t>(0) : saved.first;
  return saved;
}

}  // namespace

void note_saved(const std::filesystem::path& output, std::int64_t step) {
  Saved saved{.first = step, .last = step};
  try {
    if (const auto before = read_saved(output)) saved.first = before->first;
  } catch (const UsageError&) {  // a damaged file gives way to one that can be read
  }
  write_durably(saved_file(output),
                nlohmann::ordered_json{{"step", saved.first}, {"last", saved.last}}.dump());
}

std::optional<std::int64_t> saved_last(const std::filesystem::path& output) {
  const auto saved = read_saved(output);
  return saved ? std::optional(saved->last) : std::nullopt;
}

std::optional<std::int64_t> saved_before(const std::filesystem::path& output) {
  std::optional<std::int64_t> step;
  if (const auto saved = read_saved(output)) step = saved->first;
  for (const auto& list : {checkpoint::list_checkpoints, checkpoint::list_set_aside})
    for (const checkpoint::Checkpoint& one : list(output / "checkpoints"))
      step = std::max(step.value_or(0), one.step);
  return step;
}

}  // namespace lockstep::train
