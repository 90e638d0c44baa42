// LibTorch's random number generators: a resumed run draws the numbers that it would have drawn.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace lockstep::checkpoint {

using GeneratorStates = std::map<std::string, std::vector<std::byte>>;

// The states of the default generators of the CPU ("cpu") and, if the process computes on another
// device, of that ("cuda"). The name has no device number, because a rank may resume on another
// GPU.
GeneratorStates generator_states(const c10::Device& device);

// Sets the generators' states. A generator that is not among the states (another kind of device
// wrote them) stays as it is, with a warning; states under other names are ignored. UsageError if
// this version of LibTorch does not accept a state.
void restore_generators(const GeneratorStates& states, const c10::Device& device);

}  // namespace lockstep::checkpoint
