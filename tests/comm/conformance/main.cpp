// The test program. With --rank <backend> <device> it is one rank of a job that runs the suite,
// with --scenario <name> one rank of a job that goes wrong.
#include <cstdio>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/comm/world/join.h>

#include "../../ranks/gpu_sharing.h"
#include "own_backend.h"
#include "scenarios.h"
#include "suite.h"

namespace lockstep::comm::conformance {

namespace {

// If there are more ranks than GPUs, ranks share GPUs.
c10::Device device_of(const std::string& kind) {
  if (kind == "cpu") return c10::Device(c10::kCPU);
  const int gpus = c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount();
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(read_launch_environment().local_rank % gpus)};
}

int run_rank(const std::string& backend, const std::string& device_kind) {
  at::set_num_threads(1);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (backend == "nccl") ranks::be_a_host_for_nccl();
  if (backend == kOwnBackend) register_own_backend();
  const c10::Device device = device_of(device_kind);
  if (device.is_cuda()) c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
  const auto world =
      join_world({.backend = backend, .device = device, .timeout = milliseconds(30'000)});
  Suite suite(*world, device);
  try {
    std::printf("backend %s\n", world->backend().c_str());
    for (const auto& part : {check_reductions, check_movement, check_exchange, check_launches,
                             check_memory, check_groups, check_bad_arguments, check_ends})
      part(suite);
  } catch (const std::exception& error) {
    std::printf("FAIL [%s] threw %s\n", suite.current().c_str(), error.what());
    return 1;
  }
  std::printf("%d cells, %d failures\n", suite.num_cells(), suite.num_failures());
  return suite.num_failures() == 0 ? 0 : 1;
}

}  // namespace

}  // namespace lockstep::comm::conformance

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--rank") == 0)
    return lockstep::comm::conformance::run_rank(argv[2], argv[3]);
  if (argc == 3 && std::strcmp(argv[1], "--scenario") == 0)
    return lockstep::comm::conformance::run_scenario(argv[2]);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
