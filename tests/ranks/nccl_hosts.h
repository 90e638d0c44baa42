// Several ranks of NCCL's on one GPU.
#pragma once

#include <cstdlib>
#include <string>

#include <lockstep/base/environment.h>

namespace lockstep::ranks {

// NCCL takes one rank of a host on a GPU, and goes by this variable to tell hosts apart: ranks that
// share a GPU are hosts of their own to it, and talk over loopback. To be called before NCCL is
// used.
inline void be_a_host_for_nccl() {
  const std::string host = "rank" + std::to_string(read_launch_environment().rank);
  ::setenv("NCCL_HOSTID", host.c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  ::setenv("NCCL_IB_DISABLE", "1", 1);
}

}  // namespace lockstep::ranks
