#include <lockstep/launch/processes/rank_setup.h>

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <tuple>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::launch {

namespace fs = std::filesystem;

namespace {

std::string in_working_directory(const std::string& path) {
  std::error_code ignored;
  return fs::absolute(path, ignored).lexically_normal().string();
}

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored) && !fs::is_directory(path, ignored);
}

// Looks up a name without a slash in PATH, as a shell does.
std::string find_executable(const std::string& name) {
  std::error_code ignored;
  if (name.find('/') != std::string::npos) {
    if (fs::is_directory(name, ignored))
      throw UsageError("program '{}' is a directory: name a program in it",
                       in_working_directory(name));
    if (!is_file(name))
      throw UsageError("program '{}' does not exist (tried {}): check the path, and build it first",
                       name, in_working_directory(name));
    if (::access(name.c_str(), X_OK) != 0)
      throw UsageError("program '{}' is not executable: run 'chmod +x {}', or name its interpreter "
                       "before it",
                       in_working_directory(name), name);
    return name;
  }
  const std::string path = environment_variable("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  std::istringstream directories(path);
  for (std::string directory; std::getline(directories, directory, ':');) {
    const fs::path candidate = fs::path(directory.empty() ? "." : directory) / name;
    if (is_file(candidate) && ::access(candidate.c_str(), X_OK) == 0) return candidate.string();
  }
  if (is_file(name))
    throw UsageError("program '{}' is in none of the directories of PATH ({}), but there is {}: "
                     "write ./{}",
                     name, path, in_working_directory(name), name);
  throw UsageError("program '{}' does not exist (tried every directory of PATH: {}): check the "
                   "name, or give a path such as ./{}",
                   name, path, name);
}

std::string python() { return environment_variable("PYTHON_EXEC").value_or("python3"); }

}  // namespace

std::vector<std::string> resolve_command(const std::vector<std::string>& words, ProgramKind kind) {
  if (words.empty())
    throw UsageError("no program was given: write it after the flags, for example 'lockstep run "
                     "--nproc-per-node 4 ./my_program'");
  std::vector<std::string> command;
  if (kind == ProgramKind::python_module) {
    command = {find_executable(python()), "-u", "-m"};
  } else if (kind == ProgramKind::automatic && words[0].ends_with(".py")) {
    if (!is_file(words[0]))
      throw UsageError("Python script '{}' does not exist (tried {}): check the path", words[0],
                       in_working_directory(words[0]));
    command = {find_executable(python()), "-u"};  // unbuffered, so that lines appear as written
  } else {
    command = {find_executable(words[0])};
    command.insert(command.end(), words.begin() + 1, words.end());
    return command;
  }
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

namespace {

// Null where OpenBLAS can choose by itself.
const char* openblas_core() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return "SKYLAKEX";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "HASWELL";
#endif
  return nullptr;
}

}  // namespace

std::vector<std::pair<const char*, const char*>> computing_environment() {
  std::vector<std::pair<const char*, const char*>> all = {{"UCX_DEBUG_SIGNO", "0"}};
  if (!environment_variable("OMP_WAIT_POLICY")) all.emplace_back("GOMP_SPINCOUNT", "1000");
  if (const char* core = openblas_core()) all.emplace_back("OPENBLAS_CORETYPE", core);
  return all;
}

CpuSet::CpuSet(const std::vector<int>& cpus) {
  const int highest = cpus.empty() ? 0 : *std::max_element(cpus.begin(), cpus.end());
  bytes = CPU_ALLOC_SIZE(highest + 1);
  set = CPU_ALLOC(highest + 1);
  CPU_ZERO_S(bytes, set);
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set);
}

namespace {

template <typename Value>
void set(std::vector<std::string>& variables, const char* name, const Value& value) {
  variables.push_back(fmt::format("{}={}", name, value));
}

// Variables that libraries read, without those that the user has set.
std::vector<std::string> library_variables(const RankEnvironmentOptions& options) {
  std::vector<std::string> all;
  const auto set_default = [&](const char* name, const auto& value) {
    if (!environment_variable(name)) set(all, name, value);
  };
  set_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1);
  set_default("OMP_NUM_THREADS", options.threads);
  set_default("OPENBLAS_NUM_THREADS", options.threads);
  for (const auto& [name, value] : computing_environment()) set_default(name, value);
  return all;
}

}  // namespace

std::vector<std::string> rank_environment(const RankTable& table, int local_rank,
                                          const RankEnvironmentOptions& options) {
  std::vector<std::string> all = library_variables(options);
  const int rank = table.first_rank() + local_rank;
  set(all, "RANK", rank);
  set(all, "LOCAL_RANK", local_rank);
  set(all, "WORLD_SIZE", table.world_size());
  set(all, "LOCAL_WORLD_SIZE", table.num_local_ranks());
  set(all, "GROUP_RANK", table.node_rank);
  set(all, "GROUP_WORLD_SIZE", table.num_nodes());
  set(all, "ROLE_RANK", rank);
  set(all, "ROLE_WORLD_SIZE", table.world_size());
  set(all, "ROLE_NAME", options.role);
  set(all, "MASTER_ADDR", table.master_addr);
  set(all, "MASTER_PORT", table.master_port);
  set(all, "TORCHELASTIC_RESTART_COUNT", table.num_restarts);
  set(all, "TORCHELASTIC_MAX_RESTARTS", table.max_restarts);
  set(all, "TORCHELASTIC_RUN_ID", options.run_id);
  // MASTER_PORT is free: torch.distributed's rank 0 listens there itself.
  set(all, "TORCHELASTIC_USE_AGENT_STORE", "False");
  set(all, "LOCKSTEP_STORE", table.store);
  set(all, "LOCKSTEP_GENERATION", table.generation);
  set(all, "LOCKSTEP_SECRET_FD", options.secret_fd);
  set(all, "LOCKSTEP_PROGRESS_FD", options.progress_fd);
  set(all, "LOCKSTEP_FLIGHT_DIR", options.flight_directory);
  return all;
}

std::vector<std::string> spare_environment(const RankEnvironmentOptions& options) {
  std::vector<std::string> all = library_variables(options);
  set(all, "LOCKSTEP_SPARE", 1);
  return all;
}

int threads_per_rank(int usable_cores, int num_local_ranks) {
  if (const auto threads = environment_integer("OMP_NUM_THREADS", 1, 1 << 16))
    return static_cast<int>(*threads);
  return std::max(1, usable_cores / num_local_ranks);
}

namespace {

int read_integer(const fs::path& path, int otherwise) {
  std::ifstream file(path);
  int value = 0;
  return file >> value ? value : otherwise;
}

}  // namespace

std::vector<int> allowed_cpus() {
  // The kernel may know more CPUs than a cpu_set_t holds.
  std::vector<int> cpus;
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    const std::size_t bytes = CPU_ALLOC_SIZE(capacity);
    const bool known = ::sched_getaffinity(0, bytes, set) == 0;
    for (int cpu = 0; known && cpu < capacity; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    CPU_FREE(set);
    if (known) break;
  }
  LOCKSTEP_CHECK(!cpus.empty(), "the kernel does not say which CPUs this process may use");

  std::vector<std::tuple<int, int, int>> places;
  for (const int cpu : cpus) {
    const fs::path topology = fmt::format("/sys/devices/system/cpu/cpu{}/topology", cpu);
    places.emplace_back(read_integer(topology / "physical_package_id", 0),
                        read_integer(topology / "core_id", cpu), cpu);
  }
  std::sort(places.begin(), places.end());
  for (std::size_t i = 0; i < cpus.size(); ++i) cpus[i] = std::get<2>(places[i]);
  return cpus;
}

void pin(int pid, const std::vector<int>& cpus) {
  const CpuSet set(cpus);
  std::error_code failed;
  for (const auto& thread : fs::directory_iterator(fmt::format("/proc/{}/task", pid), failed))
    ::sched_setaffinity(std::atoi(thread.path().filename().c_str()), set.bytes, set.set);
}

std::vector<std::vector<int>> core_shares(const std::vector<int>& cpus, int usable, int num_ranks,
                                          int threads_per_rank) {
  const long needed = static_cast<long>(num_ranks) * threads_per_rank;
  if (num_ranks < 2 || needed > usable) return {};
  const std::size_t share = cpus.size() / static_cast<std::size_t>(num_ranks);
  std::vector<std::vector<int>> shares;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const auto begin = cpus.begin() + static_cast<long>(share) * rank;
    shares.emplace_back(begin, begin + static_cast<long>(share));
  }
  return shares;
}

int num_visible_gpus(const fs::path& devices) {
  int found = 0;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(devices, ignored)) {
    const std::string name = entry.path().filename();
    found += name.starts_with("nvidia") && name.size() > 6 &&
             std::all_of(name.begin() + 6, name.end(),
                         [](unsigned char c) { return std::isdigit(c) != 0; });
  }
  if (const auto list = environment_variable_or_empty("CUDA_VISIBLE_DEVICES")) {
    // CUDA ignores what follows the first entry that is no device; an empty list has no device.
    int listed = 0;
    std::istringstream entries(*list);
    for (std::string entry; std::getline(entries, entry, ',') && !entry.starts_with('-');) ++listed;
    found = std::min(found, listed);
  }
  return found;
}

}  // namespace lockstep::launch
