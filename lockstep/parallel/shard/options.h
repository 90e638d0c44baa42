// What a user may choose about sharding.
#pragma once

#include <cstddef>

#include <lockstep/parallel/shard/cpu_offload.h>
#include <lockstep/parallel/shard/mixed_precision.h>
#include <lockstep/parallel/shard/unit_plan.h>
#include <lockstep/parallel/shard/zero_plus_plus.h>

namespace lockstep::shard {

// What is cut among the ranks beside the optimizer's state.
enum class Cut {
  gradients,                 // ZeRO-2
  gradients_and_parameters,  // ZeRO-3
};

struct Options {
  Cut cut = Cut::gradients_and_parameters;
  UnitPolicy units = {};
  MixedPrecision mixed_precision = {};
  CPUOffload cpu_offload = {};
  ZeroPlusPlusConfig zero_plus_plus = {};
  // Units whose parameters are on a rank at once, the next one's included: the bound on what a rank
  // holds beyond its part. More of them spare gathers where a model goes back and forth.
  std::size_t max_live_units = 2;
  // Makes buffers (running statistics and the like) those of rank 0 after each backward pass.
  bool broadcast_buffers = true;
  // Fills parameters that are let go with NaN: finds code that reads them behind LibTorch's back.
  bool scrub_freed_memory = false;
};

}  // namespace lockstep::shard
