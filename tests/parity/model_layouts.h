// The table of layouts that the parity suite puts language models in.
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

// Sizes of the mesh's axes, slowest first, and how each is used.
struct ModelLayout {
  int pp = 1;
  int replicate = 1;  // of DDP, and copies of HYBRID_SHARD
  int shard = 1;      // of every other strategy
  int cp = 1;
  int tp = 1;
  nn::BetweenLayers between = nn::BetweenLayers::whole;
  nn::ContextAlgorithm algorithm = nn::ContextAlgorithm::ring;
  nn::SplitKind split = nn::SplitKind::zigzag;
  pipeline::ScheduleKind schedule = pipeline::ScheduleKind::one_forward_one_backward;
  int chunks = 1;  // a rank's stages
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  bool offload = false;  // parameters, gradients and the optimizer, to the host's memory

  int num_ranks() const { return pp * replicate * shard * cp * tp; }
  // That ranks have samples of their own along.
  int data_ranks() const { return replicate * shard; }
  // That are of several ranks.
  int num_axes() const;
  // Of a model that has some for each stage.
  std::int64_t num_layers() const;
  std::string text() const;
};

std::vector<ModelLayout> layouts_of(int num_ranks, Share share);

}  // namespace lockstep::parity
