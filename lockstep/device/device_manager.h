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

// Whether a format works on this device, and the reason with the figures that were measured.
struct Support {
  bool yes = false;
  std::string reason;

  explicit operator bool() const { return yes; }
};

enum class GpuUse {
  one_rank_each,  // more ranks than GPUs are an error
  shared,         // GPUs are assigned to the ranks in turn
};

// The GPU for rank `local_rank` of `local_world_size` ranks on a host with `num_gpus`. UsageError
// if they do not fit.
int pick_gpu(int local_rank, int local_world_size, int num_gpus, GpuUse use);

struct DetectOptions {
  std::optional<int> local_rank;        // the launcher's if not given
  std::optional<int> local_world_size;  // the launcher's if not given
  GpuUse gpu_use = GpuUse::one_rank_each;
  // Use only this kind of device; UsageError if it is missing. If not given, the best one is used.
  std::optional<c10::DeviceType> type;
};

// One device of this host, and the host around it. Copies share the results of probes. Thread-safe.
// Probes run when their answer is first asked for, and the answer is kept: a GPU's answers make its
// context.
class DeviceManager {
 public:
  // Chooses CUDA if LibTorch has it and a GPU answers, else MPS if LibTorch has it, else the CPU.
  static DeviceManager auto_detect(const DetectOptions& options = {});

  c10::Device device() const { return device_; }

  // Such as "NVIDIA H200" or "AMD EPYC 7B13".
  std::string name() const;

  // The number of GPUs of the device's kind on this host; 0 on a CPU.
  int num_devices() const { return num_devices_; }

  // The number of cores that this process may use, for its share of threads.
  int num_cores() const;

  // The device's memory; the host's if device and host share it.
  Memory memory() const;
  Memory host_memory() const;

  // The share of time in which the device was busy, 0 to 1; nothing if that cannot be known. CPU:
  // since the last call. GPU: in the driver's sampling period.
  std::optional<double> utilisation() const;
  // CPU: over the next `interval`, blocking. GPU: as above, at the end of the interval.
  std::optional<double> utilisation(std::chrono::milliseconds interval) const;

  // Whether training in this format makes sense on this device: its matrix product works, is right
  // and takes at most twice fp32's time. The reason has the figures.
  const Support& supports_bf16() const;
  const Support& supports_fp8() const;

 private:
  struct Probes;

  DeviceManager(c10::Device device, int num_devices);

  c10::Device device_;
  int num_devices_;
  std::shared_ptr<Probes> probes_;
};

// The floating-point operations a second that such a device can do in dense matrix products of this
// type, summed in float32, by its maker's data sheet. Nothing for a device that is not in the
// table, because a share of a wrong peak misleads.
std::optional<double> peak_flops(const std::string& device_name, c10::ScalarType type);

}  // namespace lockstep::device
