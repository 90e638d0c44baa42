#include <lockstep/elastic/cores.h>

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <tuple>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

namespace {

int read_integer(const fs::path& path, int otherwise) {
  std::ifstream file(path);
  int value = 0;
  return file >> value ? value : otherwise;
}

std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void lower_to(std::optional<double>& limit, double quota, double period) {
  if (quota > 0 && period > 0) limit = std::min(limit.value_or(quota / period), quota / period);
}

// "max 100000" or "150000 100000".
void apply_version_2(const fs::path& directory, std::optional<double>& limit) {
  std::istringstream line(read_line(directory / "cpu.max"));
  double quota = 0, period = 0;
  if (line >> quota >> period) lower_to(limit, quota, period);
}

void apply_version_1(const fs::path& directory, std::optional<double>& limit) {
  lower_to(limit, read_integer(directory / "cpu.cfs_quota_us", -1),
           read_integer(directory / "cpu.cfs_period_us", 0));
}

// A limit of any group above ours binds us as well. In a container the path may lie outside of
// what is mounted; the walk up to the mount point then still finds the container's own limit.
template <typename Apply>
void apply_upwards(const fs::path& mount, const std::string& group, Apply apply,
                   std::optional<double>& limit) {
  fs::path relative = fs::path(group).relative_path();
  while (true) {
    apply(mount / relative, limit);
    if (relative.empty()) return;
    relative = relative.parent_path();
  }
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

std::optional<double> cgroup_cpu_limit(const fs::path& memberships, const fs::path& root) {
  std::optional<double> limit;
  std::ifstream file(memberships);
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/group"
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string group = line.substr(second + 1);
    if (controllers.empty()) {
      apply_upwards(root, group, apply_version_2, limit);
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      for (const std::string& mount : {controllers, std::string("cpu")})
        apply_upwards(root / mount, group, apply_version_1, limit);
    }
  }
  return limit;
}

int usable_cores(std::size_t num_cpus, std::optional<double> limit) {
  const int all = static_cast<int>(num_cpus);
  if (!limit || *limit >= all) return all;
  return std::max(1, static_cast<int>(std::floor(*limit)));
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
    // As CUDA reads it: what follows the first entry that is no device does not count, and an empty
    // list is an empty list.
    int listed = 0;
    std::istringstream entries(*list);
    for (std::string entry; std::getline(entries, entry, ',') && !entry.starts_with('-');) ++listed;
    found = std::min(found, listed);
  }
  return found;
}

}  // namespace lockstep::elastic
