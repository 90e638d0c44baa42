#include <lockstep/device/autocast.h>

#include <ATen/autocast_mode.h>
#include <torch/version.h>

#include <lockstep/base/error.h>

namespace lockstep::device {

namespace {

namespace autocast = at::autocast;

// LibTorch 2.4 has one function for all devices; earlier versions have one for each.
#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)

bool is_available(c10::DeviceType device) { return autocast::is_autocast_available(device); }
bool is_enabled(c10::DeviceType device) { return autocast::is_autocast_enabled(device); }
void set_enabled(c10::DeviceType device, bool on) { autocast::set_autocast_enabled(device, on); }
c10::ScalarType dtype_of(c10::DeviceType device) { return autocast::get_autocast_dtype(device); }
void set_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  autocast::set_autocast_dtype(device, dtype);
}

#else

bool is_available(c10::DeviceType device) { return device == at::kCPU || device == at::kCUDA; }
bool is_enabled(c10::DeviceType device) {
  return device == at::kCPU ? autocast::is_cpu_enabled() : autocast::is_enabled();
}
void set_enabled(c10::DeviceType device, bool on) {
  device == at::kCPU ? autocast::set_cpu_enabled(on) : autocast::set_enabled(on);
}
c10::ScalarType dtype_of(c10::DeviceType device) {
  return device == at::kCPU ? autocast::get_autocast_cpu_dtype()
                            : autocast::get_autocast_gpu_dtype();
}
void set_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  device == at::kCPU ? autocast::set_autocast_cpu_dtype(dtype)
                     : autocast::set_autocast_gpu_dtype(dtype);
}

#endif

void check_device(c10::DeviceType device) {
  if (!is_available(device))
    throw UsageError("LibTorch {} has no autocast for {}: convert the model and its inputs instead",
                     TORCH_VERSION, c10::DeviceTypeName(device, /*lower_case=*/true));
}

void check_dtype(c10::DeviceType device, c10::ScalarType dtype) {
  if (dtype != at::kBFloat16 && dtype != at::kHalf)
    throw UsageError("autocast to {} was asked for: BFloat16 and Half are the types it has",
                     c10::toString(dtype));
  if (TORCH_VERSION_MAJOR < 2 && device == at::kCPU && dtype == at::kHalf)
    throw UsageError("LibTorch {} does not multiply matrices of Half on CPUs: use BFloat16",
                     TORCH_VERSION);
}

}  // namespace

Autocast::Settings Autocast::current(c10::DeviceType device) {
  return {.enabled = is_enabled(device),
          .dtype = dtype_of(device),
          .cache = autocast::is_autocast_cache_enabled()};
}

void Autocast::apply(const Settings& settings) const {
  set_enabled(device_, settings.enabled);
  set_dtype(device_, settings.dtype);
  autocast::set_autocast_cache_enabled(settings.cache);
}

Autocast::Autocast(c10::DeviceType device, const Settings& settings)
    : device_(device), before_(current(device)) {
  apply(settings);
  autocast::increment_nesting();
}

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype, CastCache cache)
    : Autocast((check_device(device), check_dtype(device, dtype), device),
               Settings{.enabled = true, .dtype = dtype, .cache = cache == CastCache::kept}) {}

Autocast Autocast::off(c10::DeviceType device) {
  check_device(device);
  Settings settings = current(device);
  settings.enabled = false;
  return Autocast(device, settings);
}

Autocast::~Autocast() {
  if (autocast::decrement_nesting() == 0) autocast::clear_cache();
  apply(before_);
}

std::optional<c10::ScalarType> Autocast::active(c10::DeviceType device) {
  if (!is_available(device) || !is_enabled(device)) return std::nullopt;
  return dtype_of(device);
}

}  // namespace lockstep::device
