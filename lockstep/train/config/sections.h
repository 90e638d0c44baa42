// How each part of a config is read. Each function takes the whole document and fills its part;
// what is wrong goes to the reader, and the part keeps its defaults there.
#pragma once

#include <lockstep/train/config.h>
#include <lockstep/train/config/json_reader.h>

namespace lockstep::train {

// No limit of the format, but sizes beyond these are slips of a finger; and products of a few of
// them cannot overflow.
inline constexpr std::int64_t kMostSteps = 1'000'000'000'000;
inline constexpr std::int64_t kMostSamples = 1 << 24;
inline constexpr std::int64_t kMostTokens = 1 << 24;

// A path of the file, made absolute: from the file's folder, or the current one for --set.
class PathReader {
 public:
  PathReader(const JsonReader& reader, const ConfigSource& source)
      : reader_(reader), source_(source) {}

  std::filesystem::path absolute(const std::string& key_path, const std::string& text) const;
  // False where the key is missing or wrong.
  bool read(JsonSection& section, std::string_view key, std::filesystem::path& path) const;

 private:
  const JsonReader& reader_;
  const ConfigSource& source_;
};

void read_data(JsonSection& top, const PathReader& paths, DataSection& data);
// After the data, whose sequences are what positions are counted in.
void read_model(JsonSection& top, const PathReader& paths, const DataSection& data,
                ModelSection& model);
void read_batch(JsonSection& top, BatchSection& batch);
// After the batch, in whose place it is, and parallel.
void read_elasticity(JsonSection& top, const ParallelSection& parallel, TrainConfig& config);
void read_optimizer(JsonSection& top, OptimizerSection& optimizer);
// After the optimizer and max_steps, which are its defaults.
void read_scheduler(JsonSection& top, TrainConfig& config);
// Steps, output, logs, checkpoints, devices.
void read_run(JsonSection& top, const PathReader& paths, const ConfigSource& source,
              TrainConfig& config);
// parallel, but for the strategy that it may name.
void read_parallel(JsonSection& top, const PathReader& paths, ParallelSection& parallel);
// Where the strategy is said.
inline constexpr std::string_view kStrategyKeys[] = {
    "sharding_strategy", "parallel.sharding_strategy", "zero_optimization.stage"};
// sharding_strategy, also in parallel, fsdp and zero_optimization.
void read_sharding(JsonSection& top, ShardingSection& sharding);
// What zero_optimization says of offload and ZeRO++, after its strategy.
void read_offload(JsonSection& zero, ShardingSection& sharding);
void read_zero_plus_plus(JsonSection& zero, ShardingSection& sharding);
// bf16, fp16 and communication_data_type, after the strategy.
void read_precision(JsonSection& top, Sharding strategy, PrecisionSection& precision);
// activation_checkpointing.
void read_recompute(JsonSection& top, double& recomputed_blocks);

// A key of DeepSpeed's that nothing here reads. One of a section stands for all that is in it.
struct DeepSpeedKey {
  enum class Fate : std::uint8_t {
    no_effect,  // accepted with any value, and told once
    not_here,   // a mistake, unless it is switched off
  };
  std::string_view path;
  Fate fate;
  std::string_view words;          // why it has no effect; what to do instead
  std::string_view harmless = {};  // what else switches it off
};
std::span<const DeepSpeedKey> deepspeed_keys();
void read_deepspeed_keys(JsonSection& top);

// That files to read are there and what is written has a place. Adds to the reader's mistakes.
void check_files(JsonReader& reader, const TrainConfig& config, NamedFiles files);

}  // namespace lockstep::train
