#include <lockstep/device/nvml.h>

#include <dlfcn.h>

namespace lockstep::device {

namespace {

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

}  // namespace

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

}  // namespace lockstep::device
