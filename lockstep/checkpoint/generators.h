// LibTorch's random number generators, so that a resumed run draws what it would have drawn.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace lockstep::checkpoint {

using GeneratorStates = std::map<std::string, std::vector<std::byte>>;

// The states of the default generators of the CPU ("cpu") and, where a process computes on another
// device, of that ("cuda"). Without the device's number: a rank may come back on another GPU.
GeneratorStates generator_states(const c10::Device& device);

// Sets them. One that is not among the states (another kind of device wrote them) is left as it is,
// with a warning; states under other names are their owners' affair. UsageError where a state is
// not one that this generator, in this version of LibTorch, can have.
void restore_generators(const GeneratorStates& states, const c10::Device& device);

}  // namespace lockstep::checkpoint
