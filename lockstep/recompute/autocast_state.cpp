#include <lockstep/recompute/autocast_state.h>

#include <ATen/autocast_mode.h>
#include <torch/version.h>

namespace lockstep::activations {

namespace {

// Older versions have functions for each device instead of an argument.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)

bool enabled_on(c10::DeviceType device) { return at::autocast::is_autocast_enabled(device); }

c10::ScalarType dtype_on(c10::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}

void set_on(c10::DeviceType device, bool enabled, c10::ScalarType dtype) {
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
}

#else

bool enabled_on(c10::DeviceType device) {
  return device == at::kCPU ? at::autocast::is_cpu_enabled() : at::autocast::is_enabled();
}

c10::ScalarType dtype_on(c10::DeviceType device) {
  return device == at::kCPU ? at::autocast::get_autocast_cpu_dtype()
                            : at::autocast::get_autocast_gpu_dtype();
}

void set_on(c10::DeviceType device, bool enabled, c10::ScalarType dtype) {
  if (device == at::kCPU) {
    at::autocast::set_cpu_enabled(enabled);
    at::autocast::set_autocast_cpu_dtype(dtype);
  } else {
    at::autocast::set_enabled(enabled);
    at::autocast::set_autocast_gpu_dtype(dtype);
  }
}

#endif

}  // namespace

AutocastState AutocastState::now() {
  AutocastState state;
  constexpr std::array kDevices = {at::kCPU, at::kCUDA};
  for (std::size_t i = 0; i < kDevices.size(); ++i)
    state.devices_[i] = {kDevices[i], enabled_on(kDevices[i]), dtype_on(kDevices[i])};
  state.cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::set() const {
  for (const OfDevice& device : devices_) set_on(device.device, device.enabled, device.dtype);
  at::autocast::set_autocast_cache_enabled(cache_enabled_);
}

AutocastScope::AutocastScope(const AutocastState& state) : before_(AutocastState::now()) {
  at::autocast::increment_nesting();
  state.set();
}

AutocastScope::~AutocastScope() {
  before_.set();
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
}

}  // namespace lockstep::activations
