// Several optimizers that step as one, each on parameters of its own.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// The state of all of them is that of each, one after the other.
std::unique_ptr<Optimizer> joined(std::vector<std::unique_ptr<Optimizer>> optimizers);

// Loads such a state into the optimizers. All of it is looked at before anything is changed.
void load_states(std::span<Optimizer* const> optimizers, const std::vector<NamedTensor>& saved);

}  // namespace lockstep::optim
