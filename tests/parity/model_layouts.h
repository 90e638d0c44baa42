// The table of layouts in which the parity suite runs language models.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/nn/context_parallel/context_parallel.h>
#include <lockstep/nn/tensor_parallel/tensor_axis.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/shard/sizes/strategy.h>

#include "share.h"

namespace lockstep::parity {

// Sizes of the mesh's axes, slowest first, and how each axis is used.
struct ModelLayout {
  int pp = 1;
  int replicate = 1;  // ranks of DDP, or copies of HYBRID_SHARD
  int shard = 1;      // ranks of every other strategy
  int cp = 1;
  int tp = 1;
  nn::BetweenLayers between = nn::BetweenLayers::whole;
  nn::ContextAlgorithm algorithm = nn::ContextAlgorithm::ring;
  nn::SplitKind split = nn::SplitKind::zigzag;
  pipeline::ScheduleKind schedule = pipeline::ScheduleKind::one_forward_one_backward;
  int chunks = 1;  // stages on each rank
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  bool offload = false;  // moves parameters, gradients and the optimizer to the host's memory

  int num_ranks() const { return pp * replicate * shard * cp * tp; }
  // The number of ranks that have samples of their own.
  int data_ranks() const { return replicate * shard; }
  // The number of axes with several ranks.
  int num_axes() const;
  // The number of layers of a model that has some for each stage.
  std::int64_t num_layers() const;
  std::string text() const;
};

std::vector<ModelLayout> layouts_of(int num_ranks, Share share);

}  // namespace lockstep::parity
