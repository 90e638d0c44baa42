#include <lockstep/checkpoint/generators.h>

#include <cstring>
#include <mutex>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/safetensors/quote.h>

namespace lockstep::checkpoint {

namespace {

std::map<std::string, at::Generator> default_generators(const at::Device& device) {
  at::Context& context = at::globalContext();
  std::map<std::string, at::Generator> result;
  result.emplace("cpu", context.defaultGenerator(at::kCPU));
  if (device.type() != at::kCPU)
    result.emplace(c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                   context.defaultGenerator(device));
  return result;
}

}  // namespace

GeneratorStates generator_states(const at::Device& device) {
  GeneratorStates states;
  for (auto& [name, generator] : default_generators(device)) {
    const std::lock_guard lock(generator.mutex());
    const at::Tensor state = generator.get_state().contiguous();
    const auto* const bytes = static_cast<const std::byte*>(state.data_ptr());
    states[name].assign(bytes, bytes + state.nbytes());
  }
  return states;
}

void restore_generators(const GeneratorStates& states, const at::Device& device) {
  for (auto& [name, generator] : default_generators(device)) {
    const auto found = states.find(name);
    if (found == states.end()) {
      log::warn("the checkpoint has no state of the random number generator {}: what it draws will "
                "differ from a run that did not stop",
                quote(name));
      continue;
    }
    at::Tensor state = at::empty({static_cast<std::int64_t>(found->second.size())}, at::kByte);
    std::memcpy(state.data_ptr(), found->second.data(), found->second.size());
    const std::lock_guard lock(generator.mutex());
    try {
      generator.set_state(state);
    } catch (const c10::Error& error) {
      throw UsageError("the state of the random number generator {} ({} bytes) is none that this "
                       "version of LibTorch can use: {}",
                       quote(name), found->second.size(), error.what_without_backtrace());
    }
  }
}

}  // namespace lockstep::checkpoint
