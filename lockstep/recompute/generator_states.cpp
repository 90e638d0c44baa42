#include <lockstep/recompute/generator_states.h>

#include <mutex>

#include <ATen/Context.h>

namespace lockstep::activations {

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
