#include <lockstep/device/device_manager.h>

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/version.h>

#include <lockstep/base/deadline.h>
#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/device/cuda.h>

namespace lockstep::device {

namespace {

struct Peak {
  const char* name;  // a part of the device's name
  double half;       // of bfloat16 and float16 in TFLOP/s
  double single;     // of float32 without TF32 in TFLOP/s
};

// The first row that fits counts, so longer names come before the names that they begin with.
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 80},       {"B200", 2250, 75},     {"B100", 1750, 60},
    {"GH200", 989.4, 67},      {"H200 NVL", 835, 60},  {"H200", 989.4, 67},
    {"H100 PCIe", 756, 51},    {"H100 NVL", 835, 60},  {"H100", 989.4, 67},
    {"H800", 989.4, 67},       {"A100", 312, 19.5},    {"A800", 312, 19.5},
    {"A40", 149.7, 37.4},      {"A30", 165, 10.3},     {"L40S", 362, 91.6},
    {"L40", 181, 90.5},        {"L4", 121, 30.3},      {"RTX 5090", 209.5, 104.8},
    {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6},
};

constexpr int kSuccess = 0;

// nvmlUtilization_t: percent.
struct Rates {
  unsigned int gpu = 0;
  unsigned int memory = 0;
};

template <typename Function>
bool find(void* library, const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, name));
  return function != nullptr;
}

#define LOCKSTEP_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||           \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

using Product = std::function<at::Tensor()>;

// Large enough to be bound by arithmetic, small enough to take about a millisecond.
std::int64_t matrix_size(c10::Device device) { return device.is_cpu() ? 256 : 2048; }

std::string first_line(std::string_view text) {
  return std::string(text.substr(0, text.find('\n')));
}

// Values in [-1, 1] that need no random generator.
at::Tensor matrix(c10::Device device, std::int64_t n, double step) {
  const auto values = at::arange(n * n, at::TensorOptions().dtype(at::kFloat).device(device));
  return values.mul(step).sin().reshape({n, n});
}

// One product of n × n matrices, in fp32 and in the format to try.
struct Products {
  Product fp32;
  Product other;
};
using Maker = std::function<Products(std::int64_t n)>;

// Reading one element back waits for the device, whichever it is.
double run_seconds(const Product& product) {
  const auto from = Clock::now();
  product().select(0, 0).select(0, 0).to(at::kFloat).item<float>();
  return std::chrono::duration<double>(Clock::now() - from).count();
}

struct Times {
  double fp32 = std::numeric_limits<double>::max();
  double other = std::numeric_limits<double>::max();
};

constexpr double kSlowest = 2;  // as a multiple of fp32's time

// The best of several turns of each, alternating, so that other load on the machine affects both
// alike. If the format looks too slow it gets more turns, because on a busy machine most of them
// measure the load.
Times measure(const Products& products) {
  constexpr int kTurns = 5;
  constexpr double kPatience = 0.3;  // seconds
  run_seconds(products.fp32);
  run_seconds(products.other);
  Times times;
  const auto from = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - from).count(); };
  for (int turn = 0; turn < kTurns || times.other > kSlowest * times.fp32; ++turn) {
    times.fp32 = std::min(times.fp32, run_seconds(products.fp32));
    times.other = std::min(times.other, run_seconds(products.other));
    if (elapsed() > kPatience) break;
  }
  return times;
}

double relative_error(const Products& products) {
  const at::Tensor expected = products.fp32();
  const at::Tensor found = products.other().to(at::kFloat);
  return (found - expected).norm().item<double>() / expected.norm().item<double>();
}

Support judge(const char* format, c10::Device device, const Maker& make) {
  constexpr double kTolerance = 0.02;
  constexpr double kLongest = 0.1;  // seconds for one product
  const auto verdict = [&](std::int64_t n, const Times& times) -> Support {
    const double giga = 2e-9 * static_cast<double>(n * n * n);
    const std::string figures =
        fmt::format("a product of {0}x{0} matrices: {1:.2f} GFLOP/s in {2}, {3:.2f} in fp32", n,
                    giga / times.other, format, giga / times.fp32);
    if (times.other > kSlowest * times.fp32)
      return {false, fmt::format("{} is more than {} times slower than fp32 on {} ({})", format,
                                 kSlowest, device.str(), figures)};
    return {true, figures};
  };

  // Tries a quarter of the size first: with the whole size a very slow format would take seconds.
  const std::int64_t n = matrix_size(device);
  const Products small = make(n / 4);
  if (const double error = relative_error(small); !(error <= kTolerance))
    return {false, fmt::format("a product of {} matrices on {} is wrong: relative error {:.2g}",
                               format, device.str(), error)};
  const Times small_times = measure(small);
  if (Support answer = verdict(n / 4, small_times);
      !answer.yes && small_times.other * 64 > kLongest)
    return answer;
  return verdict(n, measure(make(n)));
}

// Computes with one thread while it lives: on a busy machine the threads' waits for each other
// would be measured instead of the arithmetic. Only OpenMP's pool can be changed and changed back.
class OneThread {
 public:
  OneThread() {
    if (at::get_parallel_info().find("parallel backend: OpenMP") == std::string::npos) return;
    before_ = at::get_num_threads();
    at::set_num_threads(1);
  }
  ~OneThread() {
    if (before_ > 0) at::set_num_threads(before_);
  }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  int before_ = 0;
};

// Runs a probe on plain kernels, without autograd and autocast, so that it leaves no trace.
Support guarded(const char* format, c10::Device device, const std::function<Support()>& probe) {
  try {
    const c10::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<OneThread> one_thread;
    if (device.is_cpu()) one_thread.emplace();
    return probe();
  } catch (const std::exception& error) {
    return {false, fmt::format("a product of {} matrices on {} fails: {}", format, device.str(),
                               first_line(error.what()))};
  }
}

// The probes try out a number format instead of believing the device's data sheet. They multiply
// matrices in the format and in fp32, and answer no if this throws, gives wrong numbers or takes
// more than twice fp32's time. They take milliseconds if the format works, leave the random
// generators alone and never throw: an error becomes the reason.
Support probe_bf16(c10::Device device) {
  return guarded("bf16", device, [&] {
    return judge("bf16", device, [&](std::int64_t n) -> Products {
      const at::Tensor a = matrix(device, n, 0.37).to(at::kBFloat16);
      const at::Tensor b = matrix(device, n, 0.73).to(at::kBFloat16);
      return {[a = a.to(at::kFloat), b = b.to(at::kFloat)] { return at::mm(a, b); },
              [a, b] { return at::mm(a, b); }};
    });
  });
}

Support probe_fp8(c10::Device device) {
#if LOCKSTEP_TORCH_AT_LEAST(2, 5)
  return guarded("fp8", device, [&]() -> Support {
    if (device.is_cuda()) {
      const auto [major, minor] = gpu_capability(device.index());
      if (major * 10 + minor < 89)
        return {false, fmt::format("{} has compute capability {}.{}; fp8 needs 8.9 or later",
                                   device.str(), major, minor)};
    }
    return judge("fp8", device, [&](std::int64_t n) -> Products {
      const at::Tensor a = matrix(device, n, 0.37).to(at::kFloat8_e4m3fn);
      // The second factor has to be column-major.
      const at::Tensor b = matrix(device, n, 0.73).to(at::kFloat8_e4m3fn).t();
      const at::Tensor one = at::ones({}, at::TensorOptions().dtype(at::kFloat).device(device));
      return {[a = a.to(at::kFloat), b = b.to(at::kFloat)] { return at::mm(a, b); },
              [a, b, one] { return at::_scaled_mm(a, b, one, one, {}, {}, at::kBFloat16); }};
    });
  });
#else
  return {false,
          fmt::format("LibTorch {}.{} has no product of fp8 matrices on {}; 2.5 and later do",
                      TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR, device.str())};
#endif
}

}  // namespace

// NVIDIA's management library, which comes with the driver and not with CUDA, and is loaded if it
// is there. Thread-safe after construction. Never throws: unknown values are nothing.
class Nvml {
 public:
  // Null if the library is missing or does not start.
  static std::shared_ptr<const Nvml> load();

  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // The share of the last sampling period (up to a second) in which a kernel ran, 0 to 1.
  std::optional<double> utilisation(const std::string& bus_id) const;

 private:
  Nvml() = default;

  void* library_ = nullptr;
  int (*shutdown_)() = nullptr;
  int (*handle_by_bus_id_)(const char*, void**) = nullptr;
  int (*utilisation_rates_)(void*, void*) = nullptr;
};

std::shared_ptr<const Nvml> Nvml::load() {
  std::shared_ptr<Nvml> nvml(new Nvml);
  nvml->library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (nvml->library_ == nullptr) return nullptr;
  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  if (!find(nvml->library_, "nvmlInit_v2", init) ||
      !find(nvml->library_, "nvmlShutdown", shutdown) ||
      !find(nvml->library_, "nvmlDeviceGetHandleByPciBusId_v2", nvml->handle_by_bus_id_) ||
      !find(nvml->library_, "nvmlDeviceGetUtilizationRates", nvml->utilisation_rates_) ||
      init() != kSuccess)
    return nullptr;
  nvml->shutdown_ = shutdown;
  return nvml;
}

Nvml::~Nvml() {
  if (shutdown_ != nullptr) shutdown_();
  if (library_ != nullptr) dlclose(library_);
}

std::optional<double> Nvml::utilisation(const std::string& bus_id) const {
  void* handle = nullptr;
  Rates rates;
  if (handle_by_bus_id_(bus_id.c_str(), &handle) != kSuccess ||
      utilisation_rates_(handle, &rates) != kSuccess)
    return std::nullopt;
  return static_cast<double>(rates.gpu) / 100.0;
}

struct DeviceManager::Probes {
  Host host;
  std::shared_ptr<const Nvml> nvml;
  std::once_flag bf16_once;
  std::once_flag fp8_once;
  Support bf16;
  Support fp8;
};

int pick_gpu(int local_rank, int local_world_size, int num_gpus, GpuUse use) {
  if (num_gpus < 1) throw UsageError("a GPU was asked for, but no GPU answers on this host");
  if (local_world_size < 1 || local_rank < 0 || local_rank >= local_world_size)
    throw UsageError("local rank {} is not below the {} ranks of this host", local_rank,
                     local_world_size);
  if (use == GpuUse::one_rank_each && local_world_size > num_gpus)
    throw UsageError(
        "{} ranks on this host want a GPU each, but this process sees {}: start {} (lockstep run "
        "--nproc-per-node {}), or allow several ranks on one GPU (GpuUse::shared). Where the "
        "launcher hides the other ranks' GPUs from each rank (CUDA_VISIBLE_DEVICES), "
        "GpuUse::shared is right too",
        local_world_size, num_gpus, num_gpus, num_gpus);
  return local_rank % num_gpus;
}

DeviceManager DeviceManager::auto_detect(const DetectOptions& options) {
  const auto wants = [&](c10::DeviceType type) { return !options.type || *options.type == type; };
  if (wants(c10::DeviceType::CUDA)) {
    const int count = num_gpus();
    if (count > 0) {
      LaunchEnvironment launch;
      if (!options.local_rank || !options.local_world_size) launch = read_launch_environment();
      const int local_rank = options.local_rank.value_or(launch.local_rank);
      const int local_world_size = options.local_world_size.value_or(launch.local_world_size);
      const int index = pick_gpu(local_rank, local_world_size, count, options.gpu_use);
      return {c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)), count};
    }
  }
  if (wants(c10::DeviceType::MPS) && at::hasMPS()) return {c10::Device(c10::DeviceType::MPS, 0), 1};
  if (wants(c10::DeviceType::CPU)) return {c10::Device(c10::DeviceType::CPU), 0};
  throw UsageError("no device of kind '{}' on this host: this LibTorch finds {}; ask for one of "
                   "these, or name none to get the best that is there",
                   c10::DeviceTypeName(*options.type, true),
                   num_gpus() > 0 ? "cuda and cpu" : (at::hasMPS() ? "mps and cpu" : "cpu"));
}

DeviceManager::DeviceManager(c10::Device device, int num_devices)
    : device_(device), num_devices_(num_devices), probes_(std::make_shared<Probes>()) {
  if (device_.is_cuda()) probes_->nvml = Nvml::load();
}

std::string DeviceManager::name() const {
  return device_.is_cuda() ? gpu_name(device_.index()) : probes_->host.cpu_name();
}

int DeviceManager::num_cores() const { return probes_->host.num_usable_cores(); }

Memory DeviceManager::memory() const {
  return device_.is_cuda() ? gpu_memory(device_.index()) : host_memory();
}

Memory DeviceManager::host_memory() const { return probes_->host.memory(); }

std::optional<double> DeviceManager::utilisation() const {
  if (device_.is_cpu()) return probes_->host.utilisation();
  if (probes_->nvml == nullptr) return std::nullopt;
  return probes_->nvml->utilisation(gpu_bus_id(device_.index()));
}

std::optional<double> DeviceManager::utilisation(std::chrono::milliseconds interval) const {
  if (device_.is_cpu()) return probes_->host.utilisation(interval);
  std::this_thread::sleep_for(interval);
  return utilisation();
}

const Support& DeviceManager::supports_bf16() const {
  std::call_once(probes_->bf16_once, [&] { probes_->bf16 = probe_bf16(device_); });
  return probes_->bf16;
}

const Support& DeviceManager::supports_fp8() const {
  std::call_once(probes_->fp8_once, [&] { probes_->fp8 = probe_fp8(device_); });
  return probes_->fp8;
}

std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type) {
  for (const Peak& peak : kPeaks) {
    if (device_name.find(peak.name) == std::string::npos) continue;
    if (type == c10::ScalarType::BFloat16 || type == c10::ScalarType::Half) return peak.half * 1e12;
    if (type == c10::ScalarType::Float) return peak.single * 1e12;
  }
  return std::nullopt;
}

}  // namespace lockstep::device
