// Several ranks of NCCL's on one GPU.
#pragma once

#include <cstdlib>
#include <string>

#include <lockstep/base/environment.h>

namespace lockstep::ranks {

// How the kernels of processes that share a GPU run.
enum class GpuSharing {
  at_once,   // where ./dev test gpu has started NVIDIA's MPS; else in turns
  in_turns,  // some milliseconds each. Who dies takes nobody else's context along
};

// NCCL takes one rank of a host on a GPU, and goes by this variable to tell hosts apart: ranks that
// share a GPU are hosts of their own to it, and talk over loopback. To be called before CUDA is
// used.
inline void be_a_host_for_nccl(GpuSharing sharing = GpuSharing::at_once) {
  const std::string host = "rank" + std::to_string(read_launch_environment().rank);
  ::setenv("NCCL_HOSTID", host.c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("NCCL_IB_DISABLE", "1", 1);
  // As setup_distributed() does: groups must not wait for each other on the device. MPS has some
  // 128 connections for all of its processes together.
  const char* const mps = std::getenv("LOCKSTEP_TEST_MPS");
  const bool over_mps = mps != nullptr && sharing == GpuSharing::at_once;
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", over_mps ? "8" : "32", 1);
  if (over_mps) ::setenv("CUDA_MPS_PIPE_DIRECTORY", mps, 1);
}

}  // namespace lockstep::ranks
