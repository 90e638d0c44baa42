#include <lockstep/elastic/rank_environment.h>

#include <lockstep/base/environment.h>

#include <algorithm>

#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace {

class Variables {
 public:
  template <typename Value>
  void set(const char* name, const Value& value) {
    all_.push_back(fmt::format("{}={}", name, value));
  }
  // Where the user set none.
  template <typename Value>
  void set_default(const char* name, const Value& value) {
    if (!environment_variable(name)) set(name, value);
  }
  std::vector<std::string> take() { return std::move(all_); }

 private:
  std::vector<std::string> all_;
};

void add_those_of_libraries(Variables& all, const RankEnvironmentOptions& options) {
  all.set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1);
  all.set_default("OMP_NUM_THREADS", options.threads);
  all.set_default("OPENBLAS_NUM_THREADS", options.threads);
  for (const auto& [name, value] : computing_environment()) all.set_default(name, value);
}

}  // namespace

std::vector<std::string> rank_environment(const Layout& layout, int local_rank,
                                          const RankEnvironmentOptions& options) {
  Variables all;
  const int rank = layout.first_rank() + local_rank;
  all.set("RANK", rank);
  all.set("LOCAL_RANK", local_rank);
  all.set("WORLD_SIZE", layout.world_size());
  all.set("LOCAL_WORLD_SIZE", layout.num_local_ranks());
  all.set("GROUP_RANK", layout.node_rank);
  all.set("GROUP_WORLD_SIZE", layout.num_nodes());
  all.set("ROLE_RANK", rank);
  all.set("ROLE_WORLD_SIZE", layout.world_size());
  all.set("ROLE_NAME", options.role);
  all.set("MASTER_ADDR", layout.master_addr);
  all.set("MASTER_PORT", layout.master_port);
  all.set("TORCHELASTIC_RESTART_COUNT", layout.num_restarts);
  all.set("TORCHELASTIC_MAX_RESTARTS", layout.max_restarts);
  all.set("TORCHELASTIC_RUN_ID", options.run_id);
  // MASTER_PORT is free: torch.distributed's rank 0 listens there itself.
  all.set("TORCHELASTIC_USE_AGENT_STORE", "False");
  add_those_of_libraries(all, options);
  all.set("LOCKSTEP_STORE", layout.store);
  all.set("LOCKSTEP_GENERATION", layout.generation);
  all.set("LOCKSTEP_SECRET_FD", options.secret_fd);
  all.set("LOCKSTEP_PROGRESS_FD", options.progress_fd);
  all.set("LOCKSTEP_FLIGHT_DIR", options.flight_directory);
  return all.take();
}

std::vector<std::string> spare_environment(const RankEnvironmentOptions& options) {
  Variables all;
  add_those_of_libraries(all, options);
  all.set("LOCKSTEP_SPARE", 1);
  return all.take();
}

int threads_per_rank(int usable_cores, int num_local_ranks) {
  if (const auto threads = environment_integer("OMP_NUM_THREADS", 1, 1 << 16))
    return static_cast<int>(*threads);
  return std::max(1, usable_cores / num_local_ranks);
}

}  // namespace lockstep::elastic
