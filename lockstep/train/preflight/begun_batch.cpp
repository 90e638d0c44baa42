#include <lockstep/train/preflight/begun_batch.h>

#include <cmath>

#include <lockstep/base/error.h>
#include <lockstep/checkpoint/format/manifest.h>
#include <lockstep/checkpoint/format/reader.h>
#include <lockstep/train/preflight/resume_check.h>
#include <lockstep/train/preflight/run_start.h>

namespace lockstep::train {

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
