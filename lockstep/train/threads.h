// How many threads a rank computes with.
#pragma once

#include <cstdint>
#include <vector>

#include <lockstep/distributed/distributed.h>

namespace lockstep::train {

// A rank's part of its cores: `num_users` has, for each core that it may use, how many ranks of the
// host may, itself among them. Where a cgroup lets this process use fewer cores (`num_usable`), the
// ranks of the host divide those. At least 1.
int share_of_cores(const std::vector<double>& num_users, int num_usable, int num_local_ranks);

// What the config says, or else OMP_NUM_THREADS, or else this rank's share of the cores: all that
// the launcher bound it to, or the host's divided among its ranks. All ranks call it together.
int num_threads(std::int64_t threads_per_rank, const DistributedManager& dist);

}  // namespace lockstep::train
