#include <lockstep/elastic/cores.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <string>
#include <tuple>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/elastic/cpu_set.h>

namespace lockstep::elastic {

namespace fs = std::filesystem;

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
