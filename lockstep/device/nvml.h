// NVIDIA's management library, loaded when it is there: it comes with the driver, not with CUDA.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace lockstep::device {

// Thread-safe after construction. Never throws: what is not known is nothing.
class Nvml {
 public:
  // Null where the library is missing or does not start.
  static std::shared_ptr<const Nvml> load();

  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  // Share of the last sampling period (up to a second) in which a kernel ran, 0 to 1.
  std::optional<double> utilisation(const std::string& bus_id) const;

 private:
  Nvml() = default;

  void* library_ = nullptr;
  int (*shutdown_)() = nullptr;
  int (*handle_by_bus_id_)(const char*, void**) = nullptr;
  int (*utilisation_rates_)(void*, void*) = nullptr;
};

}  // namespace lockstep::device
