// The memory of weights, gradients and optimizer state alone, from a number of parameters: what
// DeepSpeed's estimate_zero2_model_states_mem_needs and estimate_zero3_… tell.
#pragma once

#include <cstdint>
#include <string_view>

#include <lockstep/plan/memory_estimate.h>

namespace lockstep::plan {

// Whether a 16-bit model is trained with weights in fp32 beside those it computes with.
enum class MasterWeights : std::uint8_t { none, fp32 };

struct ModelStateOptions {
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  int num_ranks = 1;                                   // that hold one copy of the model together
  MasterWeights master_weights = MasterWeights::fp32;  // of fp32 there is nothing to add
  Offload offload = Offload::none;
};

// In bytes, on each rank.
struct ModelStates {
  double weights = 0;
  double gradients = 0;
  double optimizer = 0;  // Adam's two averages, and the fp32 weights of a 16-bit model
  double host = 0;       // what is offloaded

  double total() const { return weights + gradients + optimizer; }
};

// Estimates for a model with so many billions of parameters, trained with Adam in fp32, bf16 or
// fp16. These are the textbook's numbers: no padding, no units in flight, gradients of 16-bit
// models in 16 bits.
//
//   estimate_memory(7, "bf16").total()                                     // 112e9
//   estimate_memory(7, "bf16", {.strategy = FULL_SHARD, .num_ranks = 8})   // 14e9
//
// UsageError for a number or a precision that makes no sense.
ModelStates estimate_memory(double params_b, std::string_view precision,
                            const ModelStateOptions& options = {});

}  // namespace lockstep::plan
