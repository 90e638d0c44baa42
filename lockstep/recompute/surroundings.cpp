#include <lockstep/recompute/surroundings.h>

#include <mutex>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
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
  for (const DeviceState& device : devices_) set_on(device.device, device.enabled, device.dtype);
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

namespace {

constexpr std::size_t kSmallBytes = 64 << 10;

at::Tensor copy_of(const at::Tensor& buffer) { return buffer.detach().clone(); }

}  // namespace

BufferValues::BufferValues(const std::vector<at::Tensor>& buffers) {
  for (const at::Tensor& buffer : buffers)
    if (buffer.defined()) values_.push_back({buffer, copy_of(buffer)});
}

void BufferValues::drop_unchanged() {
  std::erase_if(values_, [](const Value& value) {
    return value.buffer.nbytes() > kSmallBytes && value.buffer.equal(value.copy);
  });
}

BufferValues BufferValues::now() const {
  BufferValues values;
  for (const Value& value : values_)
    values.values_.push_back({value.buffer, copy_of(value.buffer)});
  return values;
}

void BufferValues::restore() const {
  const at::AutoDispatchBelowADInplaceOrView unnoticed;
  for (const Value& value : values_) value.buffer.copy_(value.copy);
}

GeneratorStates GeneratorStates::now() {
  GeneratorStates states;
  const auto add = [&](const c10::Device& device) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    at::Tensor value = generator.get_state();
    states.states_.push_back({generator, std::move(value)});
  };
  add(c10::Device(at::kCPU));
  if (at::hasCUDA()) {
    const auto& cuda = at::detail::getCUDAHooks();
    // A GPU that was never used has no context, and asking for its generator would make one.
    for (int index = 0; index < cuda.getNumGPUs(); ++index)
      if (const auto place = static_cast<c10::DeviceIndex>(index); cuda.hasPrimaryContext(place))
        add(c10::Device(at::kCUDA, place));
  }
  return states;
}

void GeneratorStates::restore() const {
  for (const State& state : states_) {
    at::Generator generator = state.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(state.value);
  }
}

}  // namespace lockstep::activations
