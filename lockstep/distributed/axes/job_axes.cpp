#include <lockstep/distributed/axes/job_axes.h>

#include <algorithm>
#include <map>
#include <numeric>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

constexpr const char* kReplicate = "dp_replicate";
constexpr const char* kShard = "dp_shard";
constexpr const char* kContext = "cp";
constexpr const char* kTensor = "tp";
constexpr const char* kPipeline = "pp";

// The number of shares of the data that a host has ranks for, or the largest part of it that
// divides the number of all shares. Stages of a pipeline are put on hosts of their own first.
int ranks_of_host(const JobSizes& job, const JobRanks& ranks) {
  const int together = job.model_parallel.tensor * job.model_parallel.context;
  return std::max(1, std::gcd(ranks.of_host / together, ranks.world / job.model_parallel.ranks()));
}

// The axes of the mesh that data is spread over.
std::vector<mesh::Axis> data_axes(const JobSizes& job, const JobRanks& ranks) {
  const ShardingStrategy strategy = job.strategy;
  const bool replicates = !cuts_gradients(strategy);
  if (job.data.empty()) {
    if (has_copies(strategy)) return {{kReplicate, -1}, {kShard, ranks_of_host(job, ranks)}};
    return {{replicates ? kReplicate : kShard, -1}};
  }
  const auto has = [&](const char* name) {
    return std::ranges::any_of(job.data, [&](const auto& axis) { return axis.name == name; });
  };
  std::string names;
  for (const mesh::Axis& axis : job.data) names += (names.empty() ? "" : ", ") + axis.name;
  for (const mesh::Axis& axis : job.data)
    if (axis.name != kReplicate && axis.name != kShard)
      throw UsageError("the mesh has an axis '{}', and data is spread over {} and {} only: what "
                       "ranks of one place in the data share is for model_parallel to say",
                       axis.name, kReplicate, kShard);
  if (!has(replicates ? kReplicate : kShard) || (has_copies(strategy) && !has(kReplicate)))
    throw UsageError("the mesh has the axes {}, but {}: give it {}", names,
                     has_copies(strategy)
                         ? fmt::format("{} cuts the model along one and copies it along another",
                                       name_of(strategy))
                     : replicates ? "the model is copied along one"
                                  : "the model is cut along one",
                     has_copies(strategy) ? fmt::format("both {} and {}", kReplicate, kShard)
                                          : std::string(replicates ? kReplicate : kShard));
  if (!has_copies(strategy) && has(kReplicate) && has(kShard))
    throw UsageError("the mesh has the axes {}, but only HYBRID_SHARD uses both", names);
  return job.data;
}

}  // namespace

std::string to_text(const ModelParallelSizes& sizes) {
  return fmt::format("tensor {} × pipeline {} × context {}", sizes.tensor, sizes.pipeline,
                     sizes.context);
}

ModelParallelSizes nearest_sizes(const ModelParallelSizes& wanted, int num_ranks,
                                 const std::function<bool(const ModelParallelSizes&)>& possible) {
  const auto changed = [&](const ModelParallelSizes& sizes) {
    return (sizes.tensor != wanted.tensor) + (sizes.pipeline != wanted.pipeline) +
           (sizes.context != wanted.context);
  };
  ModelParallelSizes best;
  const auto divides = [&](int size) { return num_ranks % size == 0; };
  for (int tensor = 1; tensor <= wanted.tensor; ++tensor) {
    for (int pipeline = 1; divides(tensor) && pipeline <= wanted.pipeline; ++pipeline) {
      for (int context = 1; divides(tensor * pipeline) && context <= wanted.context; ++context) {
        const ModelParallelSizes sizes{tensor, pipeline, context};
        if (!divides(sizes.ranks()) || sizes.ranks() < best.ranks()) continue;
        if (sizes.ranks() == best.ranks() && changed(sizes) >= changed(best)) continue;
        if (!possible || possible(sizes)) best = sizes;
      }
    }
  }
  return best;
}

JobAxes axes_for(const JobSizes& job, const JobRanks& ranks) {
  const ModelParallelSizes& sizes = job.model_parallel;
  if (const int together = sizes.ranks(); ranks.world % together != 0) {
    const int below = ranks.world / together * together;
    throw UsageError("model_parallel has {}, which is {} ranks for each share of the data, and {} "
                     "ranks do not divide into groups of so many: start {}{}, or make it {}",
                     to_text(sizes), together, ranks.world,
                     below > 0 ? fmt::format("{} or ", below) : "", below + together,
                     to_text(nearest_sizes(sizes, ranks.world)));
  }
  JobAxes made;
  const auto add = [&](const char* name, int size) {
    if (size > 1) made.axes.push_back({name, size});
    return size > 1;
  };
  if (add(kPipeline, sizes.pipeline)) made.model.emplace_back(kPipeline);
  for (const mesh::Axis& axis : data_axes(job, ranks)) {
    made.axes.push_back(axis);
    made.samples.push_back(axis.name);
  }
  made.gradients = made.samples;
  if (add(kContext, sizes.context)) made.gradients.emplace_back(kContext);
  for (const std::string& name : made.gradients)
    if (name != kReplicate) made.shards.push_back(name);
  if (add(kTensor, sizes.tensor)) made.model.emplace_back(kTensor);
  return made;
}

std::vector<std::vector<std::string>> joint_groups(const JobAxes& axes) {
  std::vector<std::vector<std::string>> groups;
  for (const auto& names : {axes.gradients, axes.shards, axes.model})
    if (names.size() > 1 && std::ranges::count(groups, names) == 0) groups.push_back(names);
  return groups;
}

namespace {

std::map<int, std::vector<int>> ranks_by_host(const std::vector<int>& ranks,
                                              const std::vector<int>& hosts) {
  std::map<int, std::vector<int>> found;
  for (std::size_t i = 0; i < ranks.size(); ++i) found[hosts[i]].push_back(ranks[i]);
  return found;
}

}  // namespace

std::optional<HostCrossing> host_crossing(const mesh::MeshShape& shape, const std::string& axis,
                                          const std::vector<int>& host_of_rank) {
  LOCKSTEP_CHECK(host_of_rank.size() == static_cast<std::size_t>(shape.world_size()),
                 "{} hosts for {} ranks", host_of_rank.size(), shape.world_size());
  HostCrossing crossing;
  for (int rank = 0; rank < shape.world_size(); ++rank) {
    if (shape.coordinate(rank, axis) != 0) continue;
    const std::vector<int> ranks = shape.group_of(rank, {axis});
    std::vector<int> hosts;
    for (const int member : ranks) hosts.push_back(host_of_rank[static_cast<std::size_t>(member)]);
    const auto by_host = ranks_by_host(ranks, hosts);
    if (by_host.size() == 1) continue;
    if (crossing.num_groups++ > 0) continue;
    crossing.ranks = ranks;
    crossing.hosts = hosts;
  }
  if (crossing.num_groups == 0) return std::nullopt;
  crossing.inside = shape.size(axis);
  std::map<int, int> ranks_on_host;
  for (const int host : host_of_rank) ++ranks_on_host[host];
  for (const auto& [host, num_ranks] : ranks_on_host)
    crossing.inside = std::gcd(crossing.inside, num_ranks);
  return crossing;
}

std::string to_text(const HostCrossing& crossing) {
  std::string text;
  for (const auto& [host, ranks] : ranks_by_host(crossing.ranks, crossing.hosts))
    text += fmt::format("{}{} of host {}", text.empty() ? "ranks " : " with ",
                        fmt::join(ranks, ", "), host);
  return text;
}

}  // namespace lockstep
