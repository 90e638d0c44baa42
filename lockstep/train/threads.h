// The number of threads that a rank computes with.
#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/distributed/distributed.h>

namespace lockstep::train {

// A rank's share of its cores. For each core that the rank may use, `num_users` has the number of
// the host's ranks that may use it, this rank included. If a cgroup lets this process use fewer
// cores (`num_usable`), the ranks of the host divide those. At least 1.
int share_of_cores(const std::vector<double>& num_users, int num_usable, int num_local_ranks);

// The config's number, or else OMP_NUM_THREADS, or else this rank's share of the cores: all cores
// that the launcher bound it to, or the host's divided among its ranks. All ranks call it together.
int num_threads(std::int64_t threads_per_rank, const DistributedManager& dist);

}  // namespace lockstep::train
