// Several ranks on one GPU.
#pragma once

#include <cstdlib>
#include <string>

#include <lockstep/base/environment.h>

namespace lockstep::ranks {

// Returns whether ./dev test gpu has started NVIDIA's MPS. With MPS, kernels of this process run at
// the same time as those of others on the GPU; without it, processes take turns of some
// milliseconds. MPS has some 128 connections for all of its processes. Must be called before CUDA
// is used.
inline bool share_the_gpu_at_once(const char* connections) {
  const char* const mps = std::getenv("LOCKSTEP_TEST_MPS");
  if (mps == nullptr) return false;
  ::setenv("CUDA_MPS_PIPE_DIRECTORY", mps, 1);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
  return true;
}

// How kernels of different ranks run on one GPU.
enum class GpuSharing {
  at_once,
  in_turns,  // a process that dies does not take another's context along
};

// NCCL allows one rank of a host on a GPU, and tells hosts apart by this variable: to NCCL, ranks
// that share a GPU are on hosts of their own, and communicate over loopback. Must be called before
// CUDA is used.
inline void be_a_host_for_nccl(GpuSharing sharing = GpuSharing::at_once) {
  const std::string host = "rank" + std::to_string(read_launch_environment().rank);
  ::setenv("NCCL_HOSTID", host.c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("NCCL_IB_DISABLE", "1", 1);
  // Does the same as setup_distributed(): groups must not wait for each other on the device.
  if (sharing == GpuSharing::in_turns || !share_the_gpu_at_once("8"))
    ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
}

}  // namespace lockstep::ranks
