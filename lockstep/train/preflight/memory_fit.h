// Whether a run fits into memory, and what would: found out before it starts, without LibTorch; and
// the advice for a run that did not.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/models/spec/config.h>
#include <lockstep/models/spec/training_step.h>
#include <lockstep/plan/memory_estimate.h>
#include <lockstep/train/config/batch.h>
#include <lockstep/train/config/config.h>

namespace lockstep::train {

plan::Offload offload_of(const TrainConfig& config);

// The memory that training may use.
struct MemoryThere {
  std::int64_t bytes = 0;
  int num_ranks_sharing = 1;         // ranks of one host share its memory
  std::string what = "this device";  // for messages
  // The host's memory for offloaded data; 0 where it is not known.
  std::int64_t host_bytes = 0;
  int num_ranks_on_host = 1;

  std::int64_t for_each_rank() const { return bytes / num_ranks_sharing; }
  bool has_room_on_host(const plan::MemoryEstimate& estimate) const;
};

enum class Fit : std::uint8_t {
  well,
  tightly,  // estimates are good to a few percent, and programs take memory besides their tensors
  not_at_all,
};
Fit fit(std::int64_t peak_bytes, std::int64_t there_bytes);

// A config's memory on any number of ranks, and with some of its choices changed.
class RunMemory {
 public:
  RunMemory(TrainConfig config, models::ModelConfig model, plan::Device device);
  // With another precision and offload than the config's.
  RunMemory(TrainConfig config, models::ModelConfig model, plan::Device device,
            plan::Precision precision, plan::Offload offload);

  // Settings that can be changed without changing the model or its results.
  struct Choice {
    ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
    int num_ranks = 1;
    int ranks_per_host = 0;  // 0: all of them
    std::int64_t micro_batch = 1;
    std::int64_t accumulation = 1;
    double recomputed_blocks = 0;
    plan::Offload offload = plan::Offload::none;

    bool operator==(const Choice&) const = default;
  };
  // The config's own settings; without offload where its strategy has none. UsageError as
  // resolve_batch(), and where the ranks do not divide into groups of the config's size.
  Choice configured(int num_ranks, int ranks_per_host = 0,
                    const std::optional<BegunBatch>& begun = {}) const;

  plan::MemoryEstimate estimate(const Choice& choice);
  const plan::ModelSizes& sizes(const Choice& choice) { return described(choice).sizes; }

  // Changes that would make it fit, the least one first, each in the config's words:
  // "sharding_strategy "FULL_SHARD" (3.1 GiB)".
  std::vector<std::string> ways_to_fit(const Choice& choice, const MemoryThere& there);

  const models::ModelConfig& model() const { return model_; }
  plan::Precision precision() const { return precision_; }
  // The offload that was asked for. Always none on CPUs, which have no device memory to offload
  // from.
  plan::Offload offload() const { return offload_; }

 private:
  const models::DescribedModel& described(const Choice& choice);

  TrainConfig config_;
  models::ModelConfig model_;
  plan::Device device_;
  plan::Precision precision_;
  plan::Offload offload_;
  // By micro-batch and share of recomputed blocks.
  std::map<std::pair<std::int64_t, double>, models::DescribedModel> described_;
};

// Returns "" where a run fits well, and a line for the log where it fits tightly. UsageError where
// it does not fit on the device or, where it is offloaded, on the host: the memory that it needs,
// the memory that there is, and changes that would fit.
std::string judge_memory(RunMemory& memory, const RunMemory::Choice& choice,
                         const MemoryThere& there);

// Whether the host or a GPU is out of memory, in any of LibTorch's wordings.
bool is_out_of_memory(const std::exception& error);

// Says how much memory was requested and which settings to make smaller, with the config's numbers.
std::string out_of_memory_advice(const TrainConfig& config, const std::exception& error);

}  // namespace lockstep::train
