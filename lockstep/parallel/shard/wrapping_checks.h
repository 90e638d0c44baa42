// Checks that refuse a model before it is sharded.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/mesh/tensors.h>

namespace lockstep::shard {

// The kind of the child that keeps torch::save() from a sharded model (data_parallel::SaveGuard).
inline constexpr const char* kSaveGuard = "sharding";

// UsageError where a module or a part of it is sharded already, or it is part of one whose
// parameters are.
void refuse_sharded(const torch::nn::Module& module);

// A sentence that says what is wrong where two of these parameters lie in the same elements, or the
// memory of one has other users (a view, detach(), data()), which would go on with what the
// parameter leaves behind. Empty where all is well. Several parameters may lie in one memory side
// by side, as an LSTM's do on a GPU.
std::string shared_memory_fault(const std::vector<NamedTensor>& parameters);

}  // namespace lockstep::shard
