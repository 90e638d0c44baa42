#include <lockstep/distributed/tensor_axis_warning.h>

#include <chrono>

#include <ATen/ATen.h>

#include <lockstep/base/log.h>
#include <lockstep/distributed/axes/job_axes.h>

namespace lockstep {

namespace {

constexpr std::int64_t kMeasuredBytes = 1 << 20;

std::vector<int> hosts_of_all(comm::Communicator& world, int host) {
  const at::Tensor hosts = at::zeros({world.size()}, at::kLong);
  hosts[world.rank()].fill_(host);
  world.all_reduce(hosts).wait();
  return {hosts.data_ptr<std::int64_t>(), hosts.data_ptr<std::int64_t>() + hosts.numel()};
}

// Of a sum, the second of two: the first may set up connections.
double milliseconds_of_sum(comm::Communicator& group, c10::Device device) {
  const at::Tensor numbers = at::zeros({kMeasuredBytes / 4}, at::dtype(at::kFloat).device(device));
  double taken = 0;
  for (int time = 0; time < 2; ++time) {
    group.barrier().wait_on_host();
    const auto start = std::chrono::steady_clock::now();
    group.all_reduce(numbers).wait_on_host();
    taken =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  return taken;
}

}  // namespace

void warn_of_tensor_axis_across_hosts(const mesh::DeviceMesh& mesh, int host, c10::Device device) {
  const auto crossing = host_crossing(mesh.shape(), "tp", hosts_of_all(*mesh.world(), host));
  if (!crossing) return;
  const auto& group = mesh.axis("tp");
  const double taken = milliseconds_of_sum(*group, device);
  if (mesh.rank() != crossing->ranks.front()) return;
  log::warn(
      "the tensor axis reaches over hosts ({}{}): each layer that is cut waits for the "
      "network twice forward and twice backward, and a sum of 1 MiB takes {:.2f} ms here. {}; "
      "pipeline and data are for what lies between hosts",
      to_text(*crossing),
      crossing->num_groups > 1 ? fmt::format(", and {} more", crossing->num_groups - 1) : "", taken,
      crossing->inside > 1
          ? fmt::format("With tensor {} it stays inside of hosts", crossing->inside)
          : "Give hosts a number of ranks that a tensor axis divides, or leave tensor at 1");
}

}  // namespace lockstep
