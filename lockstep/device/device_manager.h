// The device that this process runs on, and what the device can do.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <lockstep/device/host/host.h>

namespace lockstep::device {

// Whether something works on this device, and the reason with the figures that were measured.
struct Support {
  bool yes = false;
  std::string reason;

  explicit operator bool() const { return yes; }
};

enum class GpuUse {
  one_rank_each,  // more ranks than GPUs are an error
  shared,         // ranks are dealt to the GPUs in turn
};

// The GPU that the `local_rank`th of `local_world_size` ranks takes on a host with `num_gpus`.
// Throws a UsageError where they do not fit.
int pick_gpu(int local_rank, int local_world_size, int num_gpus, GpuUse use);

struct DetectOptions {
  std::optional<int> local_rank;        // what the launcher says where not given
  std::optional<int> local_world_size;  // likewise
  GpuUse gpu_use = GpuUse::one_rank_each;
  // Only this kind of device; UsageError where it is not there. The best there is if not given.
  std::optional<c10::DeviceType> type;
};

// One device of this host, and the host around it. Copies refer to the same probes. Thread-safe.
// Answers are probed when first asked for and kept: the answers of a GPU cost its context.
class DeviceManager {
 public:
  // CUDA where LibTorch has it and a GPU answers, else MPS where LibTorch has it, else the CPU.
  static DeviceManager auto_detect(const DetectOptions& options = {});

  c10::Device device() const { return device_; }

  // "NVIDIA H200", "AMD EPYC 7B13".
  std::string name() const;

  // GPUs of the device's kind on this host; 0 on a CPU.
  int num_devices() const { return num_devices_; }

  // Cores this process may use, for its share of threads.
  int num_cores() const;

  // The device's memory; the host's where device and host share it.
  Memory memory() const;
  Memory host_memory() const;

  // Share of time the device was busy, 0 to 1; nothing where that cannot be known. CPU: since the
  // last call. GPU: as the driver samples it.
  std::optional<double> utilisation() const;
  // CPU: over the next `interval`, blocking. GPU: as above, at its end.
  std::optional<double> utilisation(std::chrono::milliseconds interval) const;

  // Whether training in this format makes sense here: its matrix product works, is right and is
  // not slower than fp32 by more than a factor of two. The reason has the figures.
  const Support& supports_bf16() const;
  const Support& supports_fp8() const;

 private:
  struct Probes;

  DeviceManager(c10::Device device, int num_devices);

  c10::Device device_;
  int num_devices_;
  std::shared_ptr<Probes> probes_;
};

// How many floating-point operations a second such a device can do in products of dense matrices of
// this type, summed in float32, by its maker's sheet. Nothing for a device that is not in the
// table: a share of a wrong peak misleads.
std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type);

}  // namespace lockstep::device
