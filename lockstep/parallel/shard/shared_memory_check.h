// Finds tensors that share a parameter's memory, before that is given other memory.
#pragma once

#include <string>
#include <vector>

#include <lockstep/mesh/tensors.h>

namespace lockstep::shard {

// A sentence that says what is wrong where two of these parameters lie in the same elements, or the
// memory of one has other users (a view, detach(), data()), which would go on with what the
// parameter leaves behind. Empty where all is well. Several parameters may lie in one memory side
// by side, as an LSTM's do on a GPU.
std::string shared_memory_fault(const std::vector<NamedTensor>& parameters);

}  // namespace lockstep::shard
