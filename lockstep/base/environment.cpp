#include <lockstep/base/environment.h>

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

namespace lockstep {

std::optional<std::string> environment_variable_or_empty(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr) return std::nullopt;
  return std::string(value);
}

std::optional<std::string> environment_variable(const char* name) {
  auto value = environment_variable_or_empty(name);
  if (value && value->empty()) value.reset();
  return value;
}

void set_environment_default(const char* name, const char* value) {
  ::setenv(name, value, /*overwrite=*/0);
}

void set_environment(const char* name, const char* value) {
  if (*value == '\0')
    ::unsetenv(name);
  else
    ::setenv(name, value, /*overwrite=*/1);
}

std::optional<long> environment_integer(const char* name, long lowest, long highest) {
  const auto text = environment_variable(name);
  if (!text) return std::nullopt;
  long value = 0;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end != text->data() + text->size() || value < lowest ||
      value > highest)
    throw UsageError("environment variable {} is '{}': it must be a whole number from {} to {}",
                     name, *text, lowest, highest);
  return value;
}

std::string temporary_directory() {
  const auto given = environment_variable("TMPDIR");
  const std::string folder = given.value_or("/tmp");
  struct stat info {};
  std::string wrong;
  if (::stat(folder.c_str(), &info) != 0 || ::access(folder.c_str(), W_OK | X_OK) != 0)
    wrong = std::strerror(errno);
  else if (!S_ISDIR(info.st_mode))
    wrong = "it is no folder";
  if (wrong.empty()) return folder;
  if (given)
    throw UsageError("environment variable TMPDIR is '{}', where temporary files cannot be made: "
                     "{}; set it to a folder that can be written, or unset it for /tmp",
                     folder, wrong);
  throw UsageError("temporary files cannot be made in /tmp: {}; set the environment variable "
                   "TMPDIR to a folder that can be written",
                   wrong);
}

std::vector<std::string> whole_environment() {
  std::vector<std::string> all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry)
    all.emplace_back(*entry);
  return all;
}

const char* launcher_name(Launcher launcher) {
  switch (launcher) {
    case Launcher::none: return "no launcher";
    case Launcher::lockstep: return "lockstep run";
    case Launcher::torchrun: return "torchrun";
    case Launcher::mpirun: return "mpirun";
    case Launcher::srun: return "srun";
  }
  return "unknown";
}

namespace {

constexpr long kMostRanks = 1 << 20;
constexpr long kMostGenerations = 1 << 30;

int required(const char* name, long lowest, long highest, Launcher launcher) {
  const auto value = environment_integer(name, lowest, highest);
  if (!value)
    throw UsageError(
        "environment variable {} is not set, but others of {} are: start this program with "
        "'lockstep run' (or torchrun, mpirun, srun), or set RANK, WORLD_SIZE, LOCAL_RANK, "
        "MASTER_ADDR and MASTER_PORT",
        name, launcher_name(launcher));
  return static_cast<int>(*value);
}

int optional_or(const char* name, long lowest, long highest, int otherwise) {
  return static_cast<int>(environment_integer(name, lowest, highest).value_or(otherwise));
}

void read_master(LaunchEnvironment& env) {
  env.master_addr = environment_variable("MASTER_ADDR").value_or("");
  env.master_port = optional_or("MASTER_PORT", 1, 65535, 0);
}

// RANK and friends: set by lockstep run, by torchrun, or by hand.
void read_torchrun(LaunchEnvironment& env) {
  env.rank = required("RANK", 0, kMostRanks, env.launcher);
  env.world_size = required("WORLD_SIZE", 1, kMostRanks, env.launcher);
  env.local_rank = optional_or("LOCAL_RANK", 0, kMostRanks, env.rank);
  env.local_world_size = optional_or("LOCAL_WORLD_SIZE", 1, kMostRanks, env.world_size);
  env.node_rank = optional_or("GROUP_RANK", 0, kMostRanks, env.rank / env.local_world_size);
  env.num_nodes = optional_or("GROUP_WORLD_SIZE", 1, kMostRanks,
                              (env.world_size + env.local_world_size - 1) / env.local_world_size);
  env.restart_count = optional_or("TORCHELASTIC_RESTART_COUNT", 0, kMostRanks, 0);
  env.max_restarts = optional_or("TORCHELASTIC_MAX_RESTARTS", 0, kMostGenerations, 0);
  env.generation = optional_or("LOCKSTEP_GENERATION", 0, kMostGenerations, env.restart_count);
  env.run_id = environment_variable("TORCHELASTIC_RUN_ID").value_or("none");
  read_master(env);
  if (env.world_size > 1 && env.master_addr.empty())
    throw UsageError("environment variable MASTER_ADDR is not set, but RANK and WORLD_SIZE are: "
                     "set it to the address of rank 0's host (127.0.0.1 for one host)");
  if (env.world_size > 1 && env.master_port == 0)
    throw UsageError("environment variable MASTER_PORT is not set, but RANK and WORLD_SIZE are: "
                     "set it to a free port of rank 0's host, for example 29500");
}

void read_mpirun(LaunchEnvironment& env) {
  env.rank = required("OMPI_COMM_WORLD_RANK", 0, kMostRanks, env.launcher);
  env.world_size = required("OMPI_COMM_WORLD_SIZE", 1, kMostRanks, env.launcher);
  env.local_rank = required("OMPI_COMM_WORLD_LOCAL_RANK", 0, kMostRanks, env.launcher);
  env.local_world_size = required("OMPI_COMM_WORLD_LOCAL_SIZE", 1, kMostRanks, env.launcher);
  env.node_rank = env.rank / env.local_world_size;
  env.num_nodes = (env.world_size + env.local_world_size - 1) / env.local_world_size;
  env.run_id = environment_variable("PMIX_NAMESPACE").value_or("none");
  read_master(env);
}

// Slurm's count of tasks on one node, out of a list such as "4(x2),3": nodes 0 and 1 have 4 each,
// node 2 has 3.
int slurm_tasks_on(const std::string& list, int node, const char* name) {
  const auto bad = [&] {
    return UsageError("environment variable {} is '{}': it must be a list such as '4(x2),3' with "
                      "an entry for node {}",
                      name, list, node);
  };
  const char* at = list.data();
  const char* const end = at + list.size();
  const auto number = [&] {
    long value = 0;
    const auto [next, error] = std::from_chars(at, end, value);
    if (error != std::errc() || value < 1 || value > kMostRanks) throw bad();
    at = next;
    return static_cast<int>(value);
  };
  for (int first = 0;;) {
    const int tasks = number();
    int repeats = 1;
    if (end - at > 2 && at[0] == '(' && at[1] == 'x') {
      at += 2;
      repeats = number();
      if (at == end || *at++ != ')') throw bad();
    }
    first += repeats;
    if (node < first) return tasks;
    if (at == end || *at++ != ',') throw bad();
  }
}

int slurm_local_world_size(const LaunchEnvironment& env) {
  for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})
    if (const auto list = environment_variable(name))
      return slurm_tasks_on(*list, env.node_rank, name);
  return (env.world_size + env.num_nodes - 1) / env.num_nodes;
}

void read_srun(LaunchEnvironment& env) {
  env.rank = required("SLURM_PROCID", 0, kMostRanks, env.launcher);
  env.world_size = required("SLURM_NTASKS", 1, kMostRanks, env.launcher);
  env.local_rank = required("SLURM_LOCALID", 0, kMostRanks, env.launcher);
  env.node_rank = optional_or("SLURM_NODEID", 0, kMostRanks, 0);
  env.num_nodes = optional_or("SLURM_NNODES", 1, kMostRanks, 1);
  env.local_world_size = slurm_local_world_size(env);
  env.run_id = environment_variable("SLURM_JOB_ID").value_or("none");
  read_master(env);
  if (env.world_size > 1 && (env.master_addr.empty() || env.master_port == 0))
    throw UsageError("under srun set MASTER_ADDR to the first host of the allocation (scontrol "
                     "show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1) and MASTER_PORT to a "
                     "free port of it, for example 29500");
}

// The variables a launcher tells ranks with, for messages.
struct Sources {
  const char* rank;
  const char* local_rank;
  const char* local_world_size;
};

Sources sources(Launcher launcher) {
  if (launcher == Launcher::mpirun)
    return {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
  if (launcher == Launcher::srun)
    return {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"};
  return {"RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
}

void check(const LaunchEnvironment& env) {
  const Sources from = sources(env.launcher);
  if (env.rank >= env.world_size)
    throw UsageError("{} says rank {}, but there are only {} ranks (0 to {}): check how the "
                     "program was launched",
                     from.rank, env.rank, env.world_size, env.world_size - 1);
  if (env.local_rank >= env.local_world_size)
    throw UsageError("{} says local rank {}, but this host has only {} ranks: check {} and {}",
                     from.local_rank, env.local_rank, env.local_world_size, from.local_rank,
                     from.local_world_size);
}

}  // namespace

LaunchEnvironment read_launch_environment() {
  LaunchEnvironment env;
  env.run_id = "none";
  env.store_endpoint = environment_variable("LOCKSTEP_STORE").value_or("");
  env.secret_file = environment_variable("LOCKSTEP_SECRET_FILE").value_or("");
  env.flight_directory = environment_variable("LOCKSTEP_FLIGHT_DIR").value_or("");
  if (const auto fd = environment_integer("LOCKSTEP_SECRET_FD", 0, 1 << 20))
    env.secret_fd = static_cast<int>(*fd);
  if (const auto fd = environment_integer("LOCKSTEP_PROGRESS_FD", 0, 1 << 20))
    env.progress_fd = static_cast<int>(*fd);

  if (environment_variable("LOCKSTEP_SPARE")) {
    env.launcher = Launcher::lockstep;
    env.spare = true;
  } else if (!env.store_endpoint.empty()) {
    env.launcher = Launcher::lockstep;
    read_torchrun(env);
  } else if (environment_variable("RANK") || environment_variable("WORLD_SIZE")) {
    env.launcher = Launcher::torchrun;
    read_torchrun(env);
  } else if (environment_variable("OMPI_COMM_WORLD_RANK")) {
    env.launcher = Launcher::mpirun;
    read_mpirun(env);
  } else if (environment_variable("SLURM_PROCID") && environment_variable("SLURM_STEP_ID")) {
    env.launcher = Launcher::srun;
    read_srun(env);
  }
  check(env);
  return env;
}

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network {};
  ::stat("/proc/self/ns/net", &network);
  return fmt::format("{}/{}", boot, network.st_ino);
}

}  // namespace lockstep
