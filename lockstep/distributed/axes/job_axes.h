// The mesh that a job asks for: what its axes are for, and which of them reach over several hosts.
// No LibTorch, as launchers show it too.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/parallel/shard/sizes/strategy.h>

namespace lockstep {

// How many ranks work together on the same samples, by axes of the mesh. Data is spread over the
// other axes. The model decides what is cut: layers (nn::ColumnParallelLinear and the like,
// models::LanguageModel::spread), stages (pipeline::Pipeline), attention
// (nn::ContextParallelAttention).
struct ModelParallelSizes {
  int tensor = 1;    // "tp": parts of each layer; ranks next to each other
  int pipeline = 1;  // "pp": stages; ranks furthest from each other
  int context = 1;   // "cp": parts of each sequence

  int ranks() const { return tensor * pipeline * context; }
};

struct JobSizes {
  ShardingStrategy strategy = ShardingStrategy::NO_SHARD;
  std::vector<mesh::Axis> data = {};  // as DistributedConfig::mesh
  ModelParallelSizes model_parallel = {};
};

struct JobRanks {
  int world = 1;
  int of_host = 1;
};

struct JobAxes {
  std::vector<mesh::Axis> axes;        // of the mesh, slowest first
  std::vector<std::string> samples;    // along which ranks have samples of their own
  std::vector<std::string> gradients;  // along which they are summed: where samples, or parts of
                                       // them, differ
  std::vector<std::string> shards;     // of those, along which a strategy cuts the model
  std::vector<std::string> model;      // along which ranks have other parts of the model; or none
};

// "tensor 2 × pipeline 1 × context 1"
std::string to_text(const ModelParallelSizes& sizes);

// The largest sizes, none above `wanted`, whose product divides `num_ranks`; among equals, the ones
// that change the fewest of the wanted sizes. Only sizes that `possible` accepts, where it is
// given.
ModelParallelSizes nearest_sizes(
    const ModelParallelSizes& wanted, int num_ranks,
    const std::function<bool(const ModelParallelSizes&)>& possible = {});

// UsageError, with the numbers, where the sizes do not divide the ranks, the strategy needs an axis
// that is not there, or there is one that it cannot use.
JobAxes axes_for(const JobSizes& job, const JobRanks& ranks);

// The groups of these axes that span several axes of the mesh.
std::vector<std::vector<std::string>> joint_groups(const JobAxes& axes);

// An axis that reaches over several hosts.
struct HostCrossing {
  std::vector<int> ranks;  // of the first group along the axis that is on several hosts
  std::vector<int> hosts;  // the host of each of these ranks
  int num_groups = 0;      // that are on several hosts
  int inside = 1;          // the largest part of the axis that every host has whole groups of
};

// `host_of_rank` has a number for each rank of the world. Nothing where each group of the axis is
// on one host.
std::optional<HostCrossing> host_crossing(const mesh::MeshShape& shape, const std::string& axis,
                                          const std::vector<int>& host_of_rank);

// "ranks 0, 1 of host 0 with 2, 3 of host 1"
std::string to_text(const HostCrossing& crossing);

}  // namespace lockstep
