// Which processor cores the ranks of this host may use, and which rank gets which.
#pragma once

#include <filesystem>
#include <vector>

namespace lockstep::elastic {

// The logical CPUs this process may run on, ordered so that those of one package, and within it
// those of one core, stand next to each other: neighbouring shares then meet as little as they can.
std::vector<int> allowed_cpus();

// An equal, contiguous share of the CPUs for each rank. Empty where there are not enough cores for
// every thread of every rank: then the kernel's scheduler does better than any pinning.
std::vector<std::vector<int>> core_shares(const std::vector<int>& cpus, int usable, int num_ranks,
                                          int threads_per_rank);

// Lets a process run only there, with all threads it has; done as far as the kernel allows.
void pin(int pid, const std::vector<int>& cpus);

// GPUs that ranks started here would see: device files of NVIDIA's driver, fewer where
// CUDA_VISIBLE_DEVICES says so. Counted without loading any GPU library.
int num_visible_gpus(const std::filesystem::path& devices = "/dev");

}  // namespace lockstep::elastic
