// The cores and the memory that this process may use on its host, and how busy they are. Linux
// only; the limits of containers (cgroups, version 1 and 2) count as much as the machine's size.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::device {

struct Memory {
  std::uint64_t free_bytes = 0;
  std::uint64_t total_bytes = 0;
};

// Reads the kernel's files below `root` anew at each call. Thread-safe. Files that are missing or
// odd count as no limit; nothing throws.
class Host {
 public:
  explicit Host(std::filesystem::path root = "/");

  // Such as "AMD EPYC 7B13"; "aarch64 CPU" and the like if the kernel gives no name.
  std::string cpu_name() const;

  // The number of cores that the cgroups let this process keep busy; nothing if they set no limit.
  std::optional<double> cpu_quota() const;

  // The cores that the affinity mask allows, at most the whole part of a cgroup's quota; at least
  // 1.
  int num_usable_cores() const;

  // total_bytes is the smaller of the machine's memory and the cgroups' limits. free_bytes could be
  // taken now without swapping or being killed, including caches that the kernel would give back.
  Memory memory() const;

  // The share of time, 0 to 1, in which the usable cores were busy since the last call, or since
  // this object was made; nothing if the kernel does not say or no time has passed on its clock.
  std::optional<double> utilisation();

  // The same share over the next `interval`; blocks that long.
  std::optional<double> utilisation(std::chrono::milliseconds interval) const;

 private:
  struct Ticks {
    std::uint64_t busy = 0;
    std::uint64_t total = 0;
  };

  // The folders of this process's cgroup for one controller, innermost first.
  std::vector<std::filesystem::path> cgroup_folders(const std::string& controller) const;
  Ticks ticks() const;
  static std::optional<double> share(const Ticks& before, const Ticks& after);

  std::filesystem::path root_;
  std::mutex mutex_;
  Ticks last_;
};

}  // namespace lockstep::device
