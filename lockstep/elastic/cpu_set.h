// A set of logical CPUs as the kernel takes it, of whatever size.
#pragma once

#include <sched.h>

#include <algorithm>
#include <vector>

namespace lockstep::elastic {

struct CpuSet {
  explicit CpuSet(const std::vector<int>& cpus) {
    int highest = 0;
    for (const int cpu : cpus) highest = std::max(highest, cpu);
    bytes = CPU_ALLOC_SIZE(highest + 1);
    set = CPU_ALLOC(highest + 1);
    CPU_ZERO_S(bytes, set);
    for (const int cpu : cpus) CPU_SET_S(cpu, bytes, set);
  }
  ~CpuSet() { CPU_FREE(set); }
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;

  std::size_t bytes = 0;
  cpu_set_t* set = nullptr;
};

}  // namespace lockstep::elastic
