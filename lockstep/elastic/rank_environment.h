// The environment of a rank.
#pragma once

#include <string>
#include <vector>

#include <lockstep/elastic/layout.h>

namespace lockstep::elastic {

struct RankEnvironmentOptions {
  std::string run_id;
  std::string role;
  int secret_fd = -1;
  int progress_fd = -1;
  std::string flight_directory;
  int threads = 1;  // for OMP_NUM_THREADS and OPENBLAS_NUM_THREADS, where the user set neither
};

// The variables ("NAME=value") that torchrun sets, so that programs written for it run unchanged,
// and ours, as lockstep/base/environment.h reads them.
std::vector<std::string> rank_environment(const Layout& layout, int local_rank,
                                          const RankEnvironmentOptions& options);

// Of a process that stands by: what libraries read when they are loaded. It learns the rest when it
// takes the place of a rank.
std::vector<std::string> spare_environment(const RankEnvironmentOptions& options);

// Threads each rank should run: what the user set (OMP_NUM_THREADS), otherwise its share of the
// cores.
int threads_per_rank(int usable_cores, int num_local_ranks);

}  // namespace lockstep::elastic
