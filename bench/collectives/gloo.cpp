// Gloo through c10d, without Lockstep, as PyTorch uses it, for comparison. Run under `lockstep run`
// or torchrun. Not every version of Gloo has a reduce-scatter, so it is measured as an all-reduce
// of the whole. Argument: the largest size in MiB.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <lockstep/base/environment.h>
#include <lockstep/net/address.h>

#include "measure.h"

int main(int argc, char** argv) {
  using namespace lockstep;
  at::set_num_threads(1);
  const LaunchEnvironment launch = read_launch_environment();
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(launch.master_port);
  store_options.isServer = launch.rank == 0;
  store_options.numWorkers = launch.world_size;
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 3)
  store_options.useLibUV = false;
#endif
  auto store = c10::make_intrusive<c10d::TCPStore>(launch.master_addr, store_options);
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(
      net::local_host_toward({launch.master_addr, launch.master_port})));
  c10d::ProcessGroupGloo group(store, launch.rank, launch.world_size, options);

  const auto measure = [&](const char* operation, std::size_t bytes, auto call) {
    group.barrier()->wait();
    const double time = bench::median_microseconds(bytes, call);
    if (launch.rank == 0) bench::report("gloo", operation, launch.world_size, bytes, time);
  };
  for (const std::size_t bytes : bench::sizes_up_to(argc > 1 ? argv[1] : nullptr)) {
    const auto part = static_cast<std::int64_t>(bytes / 4) / launch.world_size;
    std::vector<at::Tensor> whole = {at::zeros({part * launch.world_size}, at::kFloat)};
    std::vector<at::Tensor> own = {at::zeros({part}, at::kFloat)};
    std::vector<std::vector<at::Tensor>> parts(1);
    for (int rank = 0; rank < launch.world_size; ++rank)
      parts[0].push_back(whole[0].narrow(0, rank * part, part));
    measure("all_reduce", bytes, [&] { group.allreduce(whole)->wait(); });
    measure("all_gather", bytes, [&] { group.allgather(parts, own)->wait(); });
    measure("reduce_scatter", bytes, [&] {
      group.allreduce(whole)->wait();
      own[0].copy_(parts[0][static_cast<std::size_t>(launch.rank)]);
    });
  }
  group.barrier()->wait();
}
