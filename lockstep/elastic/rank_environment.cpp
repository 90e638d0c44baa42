#include <lockstep/elastic/rank_environment.h>

#include <lockstep/base/computing_environment.h>

#include <algorithm>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::elastic {

std::vector<std::string> rank_environment(const Layout& layout, int local_rank,
                                          const RankEnvironmentOptions& options) {
  std::vector<std::string> all;
  const auto set = [&all](const char* name, const auto& value) {
    all.push_back(fmt::format("{}={}", name, value));
  };
  const auto set_default = [&set](const char* name, const auto& value) {
    if (!environment_variable(name)) set(name, value);
  };
  const int rank = layout.first_rank() + local_rank;
  set("RANK", rank);
  set("LOCAL_RANK", local_rank);
  set("WORLD_SIZE", layout.world_size());
  set("LOCAL_WORLD_SIZE", layout.num_local_ranks());
  set("GROUP_RANK", layout.node_rank);
  set("GROUP_WORLD_SIZE", layout.num_nodes());
  set("ROLE_RANK", rank);
  set("ROLE_WORLD_SIZE", layout.world_size());
  set("ROLE_NAME", options.role);
  set("MASTER_ADDR", layout.master_addr);
  set("MASTER_PORT", layout.master_port);
  set("TORCHELASTIC_RESTART_COUNT", layout.num_restarts);
  set("TORCHELASTIC_MAX_RESTARTS", layout.max_restarts);
  set("TORCHELASTIC_RUN_ID", options.run_id);
  // MASTER_PORT is free: torch.distributed's rank 0 listens there itself.
  set("TORCHELASTIC_USE_AGENT_STORE", "False");
  set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1);
  set_default("OMP_NUM_THREADS", options.threads);
  set_default("OPENBLAS_NUM_THREADS", options.threads);
  for (const auto& [name, value] : computing_environment()) set_default(name, value);
  set("LOCKSTEP_STORE", layout.store);
  set("LOCKSTEP_GENERATION", layout.generation);
  set("LOCKSTEP_SECRET_FD", options.secret_fd);
  set("LOCKSTEP_PROGRESS_FD", options.progress_fd);
  set("LOCKSTEP_FLIGHT_DIR", options.flight_directory);
  return all;
}

int threads_per_rank(int usable_cores, int num_local_ranks) {
  if (const auto threads = environment_integer("OMP_NUM_THREADS", 1, 1 << 16))
    return static_cast<int>(*threads);
  return std::max(1, usable_cores / num_local_ranks);
}

}  // namespace lockstep::elastic
