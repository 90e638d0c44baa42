#include <lockstep/train/preflight/run_start.h>

#include <algorithm>
#include <cmath>
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
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/checkpoint/safetensors/strict_json.h>
#include <lockstep/train/preflight/resume_check.h>

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

// The contents of saved.json: the steps of two checkpoints.
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

void note_saved(const std::filesystem::path& output, std::int64_t step, const FolderLock& lock) {
  Saved saved{.first = step, .last = step};
  try {
    if (const auto before = read_saved(output)) saved.first = before->first;
  } catch (const UsageError&) {  // a damaged file gives way to one that can be read
  }
  DurableFile file(saved_file(output));
  file.write(nlohmann::ordered_json{{"step", saved.first}, {"last", saved.last}}.dump());
  file.sync();
  // This process may have been stopped since the checkpoint was committed.
  lock.check();
  file.commit();
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

namespace {

constexpr const char* kSamples = "batch.samples";
constexpr const char* kMicro = "batch.micro";
constexpr const char* kRanks = "batch.ranks";
constexpr const char* kOfARank = "batch.of_a_rank";

std::optional<std::int64_t> whole_number(const std::map<std::string, double>& values,
                                         const char* name, double least) {
  constexpr double kMost = 1LL << 53;
  const auto found = values.find(name);
  if (found == values.end() || !(found->second >= least) || found->second > kMost ||
      std::trunc(found->second) != found->second)
    return std::nullopt;
  return static_cast<std::int64_t>(found->second);
}

// The batch in a state, where its run asked for the same.
std::optional<BegunBatch> begun_by(const checkpoint::TrainingState& state, const TrainConfig& now) {
  const TrainConfig then = parse_config(state.config, {.name = "config"});
  if (then.batch != now.batch || then.elasticity != now.elasticity) return std::nullopt;
  return begun_in(state.values);
}

}  // namespace

void put(const BegunBatch& begun, std::map<std::string, double>& values) {
  values[kSamples] = static_cast<double>(begun.global);
  values[kMicro] = static_cast<double>(begun.micro);
  values[kRanks] = static_cast<double>(begun.num_ranks);
  values[kOfARank] = static_cast<double>(begun.of_a_rank);
}

std::optional<BegunBatch> begun_in(const std::map<std::string, double>& values) {
  const auto samples = whole_number(values, kSamples, 1);
  const auto micro = whole_number(values, kMicro, 1);
  const auto ranks = whole_number(values, kRanks, 1);
  const auto of_a_rank = whole_number(values, kOfARank, 0);
  if (!samples || !micro || !ranks || !of_a_rank) return std::nullopt;
  return BegunBatch{
      .global = *samples, .micro = *micro, .num_ranks = *ranks, .of_a_rank = *of_a_rank};
}

std::optional<BegunBatch> begun_batch(const TrainConfig& config, const FolderHolder& now) {
  try {
    if (const auto start = begun_before(config.output, now))
      if (const auto begun = begun_by(*start, config)) return begun;
    const auto from = checkpoint_to_resume(config, now);
    if (!from) return std::nullopt;
    return begun_by(checkpoint::CheckpointReader(*from).manifest().state, config);
  } catch (const UsageError&) {
    return std::nullopt;
  }
}

}  // namespace lockstep::train
