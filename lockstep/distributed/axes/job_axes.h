// The mesh that a job asks for, and what its axes are for. No LibTorch: launchers show it too.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/mesh_shape.h>
#include <lockstep/parallel/shard/sizes/strategy.h>

namespace lockstep {

// Ranks that work together on the same samples, by axes of the mesh: those along which data is
// spread are the rest. What is cut is the model's own to say: layers (nn::ColumnParallelLinear and
// the like, models::LanguageModel::spread), stages (pipeline::Pipeline), attention
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

// Those that so many ranks divide into groups of: none larger than asked for, of the most ranks
// together that can be, and then with the fewest of them changed. `possible` is asked where given.
ModelParallelSizes nearest_sizes(
    const ModelParallelSizes& wanted, int num_ranks,
    const std::function<bool(const ModelParallelSizes&)>& possible = {});

// UsageError, with the numbers, where the sizes do not divide the ranks, the strategy needs an axis
// that is not there, or there is one that it cannot use.
JobAxes axes_for(const JobSizes& job, const JobRanks& ranks);

// Those of its groups that are of several axes.
std::vector<std::vector<std::string>> joint_groups(const JobAxes& axes);

}  // namespace lockstep
