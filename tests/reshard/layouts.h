// The layouts in which checkpoints are saved and loaded.
#pragma once

#include <string>
#include <vector>

#include "../parity/model_layouts.h"

namespace lockstep::reshard {

// The layouts of one world size. Batches of four samples fit each of them.
inline std::vector<parity::ModelLayout> layouts_of(int num_ranks) {
  using enum ShardingStrategy;
  constexpr auto kSlices = nn::BetweenLayers::by_positions;
  switch (num_ranks) {
    case 1: return {{}};
    case 2:
      return {{.tp = 2},
              {.pp = 2},
              {.cp = 2},
              {.replicate = 2},
              {.shard = 2, .strategy = SHARD_OPTIMIZER},
              {.shard = 2, .strategy = FULL_SHARD},
              {.shard = 2, .strategy = FULL_SHARD, .offload = true}};
    case 4:
      return {{.tp = 4, .between = kSlices},
              {.pp = 4},
              {.shard = 4, .strategy = SHARD_GRAD_OP},
              {.shard = 4, .strategy = SHARD_GRAD_OP, .offload = true},
              {.shard = 4, .strategy = FULL_SHARD},
              {.replicate = 2, .shard = 2, .strategy = HYBRID_SHARD},
              {.pp = 2, .replicate = 2, .schedule = pipeline::ScheduleKind::zb_v, .chunks = 2},
              {.pp = 2, .tp = 2},
              {.shard = 2, .tp = 2, .strategy = FULL_SHARD},
              {.shard = 2, .cp = 2, .strategy = SHARD_GRAD_OP},
              {.pp = 2, .shard = 2, .strategy = SHARD_OPTIMIZER}};
    default: return {};
  }
}

inline const std::vector<int> kWorldSizes = {1, 2, 4};

// The folder of a layout's checkpoints, named after the size of its world and its index there.
inline std::string folder_name(int num_ranks, std::size_t index) {
  return std::to_string(num_ranks) + "-" + std::to_string(index);
}

}  // namespace lockstep::reshard
