#include <lockstep/distributed/job_axes.h>

#include <algorithm>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

constexpr const char* kReplicate = "dp_replicate";
constexpr const char* kShard = "dp_shard";
constexpr const char* kContext = "cp";
constexpr const char* kTensor = "tp";
constexpr const char* kPipeline = "pp";

// Those of a host that have samples of their own: stages are on hosts of their own first.
int ranks_of_host(const DistributedConfig& config, int local_world_size) {
  const int together = config.model_parallel.tensor * config.model_parallel.context;
  return std::max(1, local_world_size / together);
}

// Those that data is spread over.
std::vector<mesh::Axis> data_axes(const DistributedConfig& config, int local_world_size) {
  const ShardingStrategy strategy = strategy_of(config);
  const bool replicates = !takes_units(config);
  if (config.mesh.empty()) {
    if (strategy == ShardingStrategy::HYBRID_SHARD)
      return {{kReplicate, -1}, {kShard, ranks_of_host(config, local_world_size)}};
    return {{replicates ? kReplicate : kShard, -1}};
  }
  const auto has = [&](const char* name) {
    return std::ranges::any_of(config.mesh, [&](const auto& axis) { return axis.name == name; });
  };
  std::string names;
  for (const mesh::Axis& axis : config.mesh) names += (names.empty() ? "" : ", ") + axis.name;
  for (const mesh::Axis& axis : config.mesh)
    if (axis.name != kReplicate && axis.name != kShard)
      throw UsageError("the mesh has an axis '{}', and data is spread over {} and {} only: what "
                       "ranks of one place in the data share is for model_parallel to say",
                       axis.name, kReplicate, kShard);
  if (!has(replicates ? kReplicate : kShard) ||
      (strategy == ShardingStrategy::HYBRID_SHARD && !has(kReplicate)))
    throw UsageError("the mesh has the axes {}, but {}: give it {}", names,
                     strategy == ShardingStrategy::HYBRID_SHARD
                         ? "HYBRID_SHARD cuts the model along one and copies it along another"
                     : replicates ? "the model is copied along one"
                                  : "the model is cut along one",
                     strategy == ShardingStrategy::HYBRID_SHARD
                         ? fmt::format("both {} and {}", kReplicate, kShard)
                         : std::string(replicates ? kReplicate : kShard));
  if (strategy != ShardingStrategy::HYBRID_SHARD && has(kReplicate) && has(kShard))
    throw UsageError("the mesh has the axes {}, but only HYBRID_SHARD uses both", names);
  return config.mesh;
}

}  // namespace

JobAxes axes_for(const DistributedConfig& config, int local_world_size) {
  const ModelParallelSizes& sizes = config.model_parallel;
  JobAxes job;
  const auto add = [&](const char* name, int size) {
    if (size > 1) job.axes.push_back({name, size});
    return size > 1;
  };
  if (add(kPipeline, sizes.pipeline)) job.model.emplace_back(kPipeline);
  for (const mesh::Axis& axis : data_axes(config, local_world_size)) {
    job.axes.push_back(axis);
    job.samples.push_back(axis.name);
  }
  job.gradients = job.samples;
  if (add(kContext, sizes.context)) job.gradients.emplace_back(kContext);
  for (const std::string& name : job.gradients)
    if (name != kReplicate) job.shards.push_back(name);
  if (add(kTensor, sizes.tensor)) job.model.emplace_back(kTensor);
  return job;
}

std::vector<std::vector<std::string>> joint_groups(const JobAxes& axes) {
  std::vector<std::vector<std::string>> groups;
  for (const auto& names : {axes.gradients, axes.shards, axes.model})
    if (names.size() > 1 && std::ranges::count(groups, names) == 0) groups.push_back(names);
  return groups;
}

std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes) {
  if (axes.empty()) return nullptr;
  return axes.size() == 1 ? mesh.axis(axes.front()) : mesh.flatten(axes);
}

}  // namespace lockstep
