// The layout of a run: the layers, parts of them, positions and samples that each rank has. No
// LibTorch: found out before any rank starts.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <lockstep/distributed/axes/job_axes.h>
#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/parallel/shard/sizes/strategy.h>
#include <lockstep/train/config/config.h>
#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::train {

struct RankLayout {
  int host = 0;
  std::vector<int> coordinates;        // along the mesh's axes
  std::vector<int> stages;             // of the pipeline; one, 0, where there is none
  std::vector<mesh::Interval> layers;  // of each of these
  // The part of each layer that a tensor axis leaves on the rank; all of it where there is no such
  // axis.
  mesh::Interval heads;
  mesh::Interval kv_heads;
  mesh::Interval inside;                  // of the MLP
  mesh::Interval vocabulary;              // rows of the embedding and of the head
  std::vector<mesh::Interval> positions;  // of each sequence
  int data_rank = 0;   // has samples data_rank, data_rank + data_ranks, … of each batch
  int shard_rank = 0;  // which of RunLayout::shards
  std::int64_t num_parameters = 0;  // of its layers, before the strategy cuts them
};

struct RunLayout {
  mesh::MeshShape shape;
  JobAxes axes;
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  int shards = 1;  // ranks that hold together what the strategy cuts
  int data_ranks = 1;
  std::vector<RankLayout> ranks;
  // Where the tensor axis reaches over hosts, and what a rank sends along it in a step: on a GPU,
  // unless the config says that there is none.
  std::optional<HostCrossing> tensor_crossing;
  std::int64_t tensor_bytes = 0;
};

// The job's axes, as a config names them.
JobSizes job_sizes(const TrainConfig& config);

// UsageError as resolve_run(); for `ranks_per_host` that do not divide the ranks, too.
RunLayout layout_of(const TrainConfig& config, const ResolvedRun& run, int num_ranks,
                    int ranks_per_host);

}  // namespace lockstep::train
