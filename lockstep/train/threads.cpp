#include <lockstep/train/threads.h>

#include <sched.h>

#include <algorithm>
#include <cmath>

#include <lockstep/base/environment.h>

namespace lockstep::train {

namespace {

// Empty if the kernel does not say, because the host has more than CPU_SETSIZE cores.
std::vector<std::size_t> allowed_cores() {
  cpu_set_t set;
  std::vector<std::size_t> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return cores;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

// For each core that this rank may use, the number of the host's ranks that may use it.
std::vector<double> num_users(const DistributedManager& dist, const LaunchEnvironment& launch) {
  const std::vector<std::size_t> cores = allowed_cores();
  const auto node = static_cast<std::size_t>(launch.node_rank);
  // One table for all hosts: every rank adds its cores to the row of its host.
  std::vector<double> table(static_cast<std::size_t>(launch.num_nodes) * CPU_SETSIZE);
  for (const std::size_t core : cores) table.at(node * CPU_SETSIZE + core) = 1;
  if (dist.world_size() > 1) table = dist.sum(std::move(table));
  std::vector<double> users;
  for (const std::size_t core : cores) users.push_back(table[node * CPU_SETSIZE + core]);
  return users;
}

}  // namespace

int share_of_cores(const std::vector<double>& num_users, int num_usable, int num_local_ranks) {
  constexpr double kRounding = 1e-6;  // three thirds are one
  const double limit = static_cast<double>(num_usable) / num_local_ranks;
  double share = 0;
  for (const double users : num_users) share += 1 / std::max(users, 1.0);
  if (num_users.empty()) share = limit;
  if (static_cast<std::size_t>(num_usable) < num_users.size()) share = std::min(share, limit);
  return std::max(1, static_cast<int>(std::floor(share + kRounding)));
}

int num_threads(std::int64_t threads_per_rank, const DistributedManager& dist) {
  const LaunchEnvironment launch = read_launch_environment();
  // This comes before anything that may differ between ranks, because all ranks meet in it.
  const std::vector<double> users = num_users(dist, launch);
  if (threads_per_rank > 0) return static_cast<int>(threads_per_rank);
  if (const auto wanted = environment_integer("OMP_NUM_THREADS", 1, 1 << 16))
    return static_cast<int>(*wanted);
  return share_of_cores(users, dist.device_manager().num_cores(), launch.local_world_size);
}

}  // namespace lockstep::train
