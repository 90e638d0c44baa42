#include <lockstep/device/host/host.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <limits>
#include <sstream>
#include <thread>

#include <sched.h>
#include <sys/utsname.h>

#include <lockstep/base/file.h>

namespace lockstep::device {

namespace {

namespace fs = std::filesystem;

std::string read_text(const fs::path& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return in ? text.str() : std::string();
}

// "max", or any other text that is no number, counts as no number.
std::optional<std::uint64_t> read_number(const fs::path& path) {
  const std::string text = read_text(path);
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

// The number after a key, as in "MemTotal:  1234 kB" or "inactive_file 5678".
std::optional<std::uint64_t> read_field(const fs::path& path, const std::string& key) {
  std::istringstream lines(read_text(path));
  std::string line;
  while (std::getline(lines, line)) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t value = 0;
    if (words >> word && word == key && words >> value) return value;
  }
  return std::nullopt;
}

// The cores on which this process may run.
std::vector<int> allowed_cores() {
  for (int most = 1024; most <= 1 << 20; most *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(most));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(most));
    std::vector<int> cores;
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    for (int core = 0; fits && core < most; ++core)
      if (CPU_ISSET_S(static_cast<std::size_t>(core), bytes, set)) cores.push_back(core);
    CPU_FREE(set);
    if (fits) return cores;
  }
  const unsigned count = std::max(1u, std::thread::hardware_concurrency());
  std::vector<int> cores;
  for (unsigned core = 0; core < count; ++core) cores.push_back(static_cast<int>(core));
  return cores;
}

std::string trimmed(std::string text) {
  const auto from = text.find_first_not_of(" \t");
  const auto to = text.find_last_not_of(" \t\r\n");
  return from == text.npos ? std::string() : text.substr(from, to - from + 1);
}

}  // namespace

Host::Host(fs::path root) : root_(std::move(root)) { last_ = ticks(); }

std::string Host::cpu_name() const {
  std::istringstream lines(read_text(root_ / "proc/cpuinfo"));
  std::string line;
  std::string implementer;
  std::string part;
  while (std::getline(lines, line)) {
    const auto colon = line.find(':');
    if (colon == line.npos) continue;
    const std::string key = trimmed(line.substr(0, colon));
    const std::string value = trimmed(line.substr(colon + 1));
    if (key == "model name" && !value.empty()) return value;
    if (key == "CPU implementer") implementer = value;
    if (key == "CPU part") part = value;
  }
  utsname system{};
  std::string name = uname(&system) == 0 ? system.machine : "unknown";
  name += " CPU";
  // Arm kernels give numbers instead of a name.
  if (!part.empty()) name += " (implementer " + implementer + ", part " + part + ")";
  return name;
}

std::vector<fs::path> Host::cgroup_folders(const std::string& controller) const {
  // Lines of "number:controllers:path"; version 2 has one line, with no controllers.
  std::istringstream lines(read_text(root_ / "proc/self/cgroup"));
  std::string line;
  std::string path_v1;
  std::string path_v2;
  std::string mount_v1;  // "cpu,cpuacct"; "cpu" may be a link to it
  while (std::getline(lines, line)) {
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") path_v2 = path;
    if (controllers.find("," + controller + ",") != controllers.npos) {
      path_v1 = path;
      mount_v1 = line.substr(first + 1, second - first - 1);
    }
  }
  fs::path top = root_ / "sys/fs/cgroup";
  const bool is_v1 = !mount_v1.empty();
  if (is_v1) top /= is_there(top / mount_v1) ? mount_v1 : controller;
  // If the container does not see its own path, the walk up still ends at its top.
  std::vector<fs::path> folders;
  fs::path path = fs::path(is_v1 ? path_v1 : path_v2).relative_path().lexically_normal();
  for (; !path.empty() && path != "." && *path.begin() != ".."; path = path.parent_path())
    folders.push_back(top / path);
  folders.push_back(top);
  return folders;
}

std::optional<double> Host::cpu_quota() const {
  std::optional<double> cores;
  for (const fs::path& folder : cgroup_folders("cpu")) {
    double quota = 0;
    double period = 0;
    std::istringstream v2(read_text(folder / "cpu.max"));
    if (!(v2 >> quota >> period)) {
      quota = static_cast<double>(read_number(folder / "cpu.cfs_quota_us").value_or(0));
      period = static_cast<double>(read_number(folder / "cpu.cfs_period_us").value_or(0));
    }
    if (quota > 0 && period > 0) cores = std::min(cores.value_or(quota / period), quota / period);
  }
  return cores;
}

int Host::num_usable_cores() const {
  const auto allowed = static_cast<double>(allowed_cores().size());
  return std::max(1, static_cast<int>(std::min(allowed, cpu_quota().value_or(allowed))));
}

Memory Host::memory() const {
  constexpr std::uint64_t kKibi = 1024;
  const fs::path meminfo = root_ / "proc/meminfo";
  Memory memory;
  memory.total_bytes = read_field(meminfo, "MemTotal:").value_or(0) * kKibi;
  memory.free_bytes = read_field(meminfo, "MemAvailable:").value_or(0) * kKibi;
  for (const fs::path& folder : cgroup_folders("memory")) {
    auto limit = read_number(folder / "memory.max");
    auto used = read_number(folder / "memory.current");
    auto cache = read_field(folder / "memory.stat", "inactive_file");
    if (!used) {
      limit = read_number(folder / "memory.limit_in_bytes");
      used = read_number(folder / "memory.usage_in_bytes");
      cache = read_field(folder / "memory.stat", "total_inactive_file");
    }
    if (!limit || !used) continue;
    const std::uint64_t held = *used - std::min(*used, cache.value_or(0));
    memory.total_bytes = std::min(memory.total_bytes, *limit);
    memory.free_bytes = std::min(memory.free_bytes, *limit - std::min(*limit, held));
  }
  return memory;
}

Host::Ticks Host::ticks() const {
  const std::vector<int> cores = allowed_cores();
  std::istringstream lines(read_text(root_ / "proc/stat"));
  std::string line;
  Ticks ticks;
  while (std::getline(lines, line)) {
    // "cpu3 user nice system idle iowait irq softirq steal ..."
    if (!line.starts_with("cpu") || line.size() < 4 || line[3] == ' ') continue;
    int core = -1;
    std::from_chars(line.data() + 3, line.data() + line.size(), core);
    if (!std::binary_search(cores.begin(), cores.end(), core)) continue;
    std::istringstream words(line);
    std::string label;
    words >> label;
    std::uint64_t value = 0;
    for (int column = 0; column < 8 && words >> value; ++column) {
      ticks.total += value;
      const bool waiting = column == 3 || column == 4;
      if (!waiting) ticks.busy += value;
    }
  }
  return ticks;
}

std::optional<double> Host::share(const Ticks& before, const Ticks& after) {
  if (after.total <= before.total || after.busy < before.busy) return std::nullopt;
  return std::min(1.0, static_cast<double>(after.busy - before.busy) /
                           static_cast<double>(after.total - before.total));
}

std::optional<double> Host::utilisation() {
  const std::lock_guard lock(mutex_);
  const Ticks now = ticks();
  const auto result = share(last_, now);
  if (result) last_ = now;
  return result;
}

std::optional<double> Host::utilisation(std::chrono::milliseconds interval) const {
  const Ticks before = ticks();
  std::this_thread::sleep_for(interval);
  return share(before, ticks());
}

}  // namespace lockstep::device
