#include <cli/torch/check/report.h>

#include <dlfcn.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/device/cuda.h>
#include <lockstep/device/device_manager.h>
#include <lockstep/device/host_memory.h>
#include <lockstep/launch/processes/rank_setup.h>
#include <lockstep/net/address.h>

namespace lockstep::cli::inspection {

namespace {

namespace fs = std::filesystem;

std::int64_t limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0) return -1;
  return limit.rlim_cur == RLIM_INFINITY ? -1 : static_cast<std::int64_t>(limit.rlim_cur);
}

std::int64_t num_open_files() {
  std::error_code none;
  std::int64_t count = 0;
  for (const auto& file : fs::directory_iterator("/proc/self/fd", none)) {
    (void)file;
    ++count;
  }
  return count;
}

// The file of the BLAS that LibTorch calls: the first of the loaded libraries that has its symbol.
// A LibTorch with MKL or OpenBLAS inside shows nothing, or itself.
std::string blas_file() {
  void* const symbol = ::dlsym(RTLD_DEFAULT, "sgemm_");
  Dl_info info{};
  if (symbol == nullptr || ::dladdr(symbol, &info) == 0) return "";
  std::error_code none;
  const fs::path file = fs::canonical(info.dli_fname, none);
  const std::string text = none ? info.dli_fname : file.string();
  return text.find("libtorch") == std::string::npos ? text : "";
}

std::int64_t shared_memory_bytes() {
  struct statvfs status {};
  if (::statvfs("/dev/shm", &status) != 0) return -1;
  return static_cast<std::int64_t>(status.f_blocks) * static_cast<std::int64_t>(status.f_frsize);
}

std::int64_t tcp_buffer_bytes() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_rmem");
  std::int64_t least = 0, initial = 0, most = -1;
  return file >> least >> initial >> most ? most : -1;
}

bool has_infiniband() {
  std::error_code none;
  const fs::directory_iterator devices("/sys/class/infiniband", none);
  return !none && devices != fs::directory_iterator();
}

std::string system_name() {
  utsname names{};
  ::uname(&names);
  return fmt::format("{} {}, {}", names.sysname, names.release, names.machine);
}

// As the transports tell hosts apart.
std::string host_id() { return comm::Endpoint("127.0.0.1", net::Secret::random()).address().host; }

device::DeviceManager own_device(const LaunchEnvironment& launch) {
  return device::DeviceManager::auto_detect({.local_rank = launch.local_rank,
                                             .local_world_size = launch.local_world_size,
                                             .gpu_use = device::GpuUse::shared});
}

// The best of a few copies: what the link can do, not what else happens on it.
double copy_gbps(int from, int to) {
  constexpr std::int64_t kBytes = 64 << 20;
  constexpr int kCopies = 5;
  const auto on = [](int gpu) {
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu));
  };
  const at::Tensor source = at::zeros({kBytes}, at::dtype(at::kByte).device(on(from)));
  const at::Tensor copy = at::empty({kBytes}, at::dtype(at::kByte).device(on(to)));
  double best = 0;
  for (int i = 0; i < kCopies; ++i) {
    device::wait_for(on(from));
    device::wait_for(on(to));
    const auto begin = std::chrono::steady_clock::now();
    copy.copy_(source, /*non_blocking=*/true);
    device::wait_for(on(from));
    device::wait_for(on(to));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    best = std::max(best, double(kBytes) / taken.count() * 1e-9);
  }
  return best;
}

std::vector<GpuPair> measure_gpu_pairs(int num_gpus) {
  std::vector<GpuPair> pairs;
  for (int a = 0; a < num_gpus; ++a)
    for (int b = a + 1; b < num_gpus; ++b)
      pairs.push_back({.a = a,
                       .b = b,
                       .reach_each_other = device::gpus_reach_each_other(a, b),
                       .bandwidth_gbps = copy_gbps(a, b)});
  return pairs;
}

Answer answer(const device::Support& support) { return {support.yes, support.reason}; }

}  // namespace

Rank describe_rank(const LaunchEnvironment& launch) {
  const device::DeviceManager manager = own_device(launch);
  const device::Memory memory = manager.memory();
  Rank rank;
  rank.rank = launch.rank;
  rank.local_rank = launch.local_rank;
  rank.host = net::own_host_name();
  rank.host_id = host_id();
  rank.cpus = launch::allowed_cpus();
  rank.num_threads = at::get_num_threads();
  rank.threads_chosen = environment_variable("OMP_NUM_THREADS").has_value();
  rank.device = manager.device().str();
  rank.device_name = manager.name();
  if (manager.device().is_cuda()) rank.device_id = device::gpu_bus_id(manager.device().index());
  rank.device_free_bytes = memory.free_bytes;
  rank.device_total_bytes = memory.total_bytes;
  rank.open_files = num_open_files();
  rank.open_files_limit = limit_of(RLIMIT_NOFILE);
  rank.locked_memory_limit = limit_of(RLIMIT_MEMLOCK);
  return rank;
}

Host describe_host(const LaunchEnvironment& launch) {
  const device::DeviceManager manager = own_device(launch);
  const device::Memory memory = manager.host_memory();
  Host host;
  host.name = net::own_host_name();
  host.id = host_id();
  host.system = system_name();
  host.cpu = device::Host().cpu_name();
  host.cpu_quota = device::Host().cpu_quota().value_or(-1);
  host.free_bytes = memory.free_bytes;
  host.total_bytes = memory.total_bytes;
  for (int index = 0; index < device::num_gpus(); ++index)
    host.gpus.push_back(device::gpu_name(index));
  host.num_gpu_files = launch::num_visible_gpus();
  host.torch_version = TORCH_VERSION;
  host.torch_has_cuda = at::hasCUDA() || at::globalContext().hasCUDART();
  host.torch_build = at::show_config();
  host.blas = blas_file();
  if (launch.local_rank == 0) {
    host.bf16 = answer(manager.supports_bf16());
    host.fp8 = answer(manager.supports_fp8());
    host.gpu_pairs = measure_gpu_pairs(device::num_gpus());
  }
  host.shared_memory_bytes = shared_memory_bytes();
  host.tcp_buffer_bytes = tcp_buffer_bytes();
  host.infiniband = has_infiniband();
  return host;
}

}  // namespace lockstep::cli::inspection
