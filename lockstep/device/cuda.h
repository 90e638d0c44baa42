// Queries to the CUDA runtime. If LibTorch has no CUDA, there are no GPUs, and only num_gpus() may
// be called.
#pragma once

#include <string>
#include <utility>

#include <lockstep/device/host/host.h>

namespace lockstep::device {

// The number of GPUs that answer; 0 if there is no driver or no CUDA in LibTorch.
int num_gpus();

// Properties of GPU `index`, 0 to num_gpus() - 1. CUDA's errors are thrown as UsageError.
std::string gpu_name(int index);
std::string gpu_bus_id(int index);              // "0000:3b:00.0"
std::pair<int, int> gpu_capability(int index);  // {9, 0}
Memory gpu_memory(int index);
// Whether kernels and copies of each GPU reach the other's memory without passing through the
// host's.
bool gpus_reach_each_other(int one, int other);
// The most bytes that tensors of this process have taken on the GPU at once.
std::size_t gpu_peak_bytes(int index);

}  // namespace lockstep::device
