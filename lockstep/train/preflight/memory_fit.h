// Whether a run fits into memory, and what would: found out before it starts, without LibTorch.
#pragma once

#include <cstdint>
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

// What there is to train in.
struct MemoryThere {
  std::int64_t bytes = 0;
  int num_ranks_sharing = 1;         // ranks of one host share its memory
  std::string what = "this device";  // for messages
  // For what is offloaded; 0: nobody knows.
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

  // What can be chosen otherwise without another model or another answer.
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
  // As the config says; without offload where its strategy has none. UsageError as resolve_batch()
  // and where groups of ranks do not divide so many.
  Choice configured(int num_ranks, int ranks_per_host = 0,
                    const std::optional<BegunBatch>& begun = {}) const;

  plan::MemoryEstimate estimate(const Choice& choice);
  const plan::ModelSizes& sizes(const Choice& choice) { return described(choice).sizes; }

  // What would make it fit, the least change first, each in the config's words:
  // "sharding_strategy "FULL_SHARD" (3.1 GiB)".
  std::vector<std::string> ways_to_fit(const Choice& choice, const MemoryThere& there);

  const models::ModelConfig& model() const { return model_; }
  plan::Precision precision() const { return precision_; }
  // What was asked for. Always none on CPUs, where there is nothing to take it from.
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

// Empty where a run fits well; a line to say where it fits tightly. UsageError where it does not
// fit, on the device or, where it is offloaded, on the host: what it takes, what there is, and what
// would fit.
std::string judge_memory(RunMemory& memory, const RunMemory::Choice& choice,
                         const MemoryThere& there);

}  // namespace lockstep::train
