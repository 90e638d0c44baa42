#include <lockstep/device/device_manager.h>

#include <mutex>
#include <thread>

#include <ATen/Context.h>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/device/cuda.h>
#include <lockstep/device/nvml.h>
#include <lockstep/device/probe.h>

namespace lockstep::device {

namespace {

struct Peak {
  const char* name;  // a part of the device's
  double half;       // of bfloat16 and float16, in TFLOP/s
  double single;     // of float32, without TF32
};

// The first that fits: longer names come before those that they begin with.
constexpr Peak kPeaks[] = {
    {"GB200", 2500, 80},       {"B200", 2250, 75},     {"B100", 1750, 60},
    {"GH200", 989.4, 67},      {"H200 NVL", 835, 60},  {"H200", 989.4, 67},
    {"H100 PCIe", 756, 51},    {"H100 NVL", 835, 60},  {"H100", 989.4, 67},
    {"H800", 989.4, 67},       {"A100", 312, 19.5},    {"A800", 312, 19.5},
    {"A40", 149.7, 37.4},      {"A30", 165, 10.3},     {"L40S", 362, 91.6},
    {"L40", 181, 90.5},        {"L4", 121, 30.3},      {"RTX 5090", 209.5, 104.8},
    {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6},
};

}  // namespace

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
