// Several optimizers that step as one, each on parameters of its own.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// One optimizer of several. Its state is the state of each, one after the other. They step in turn:
// a UsageError in one leaves those before it stepped.
std::unique_ptr<Optimizer> joined(std::vector<std::unique_ptr<Optimizer>> optimizers);

// Loads such a state into the optimizers. All of it is looked at before anything is changed.
void load_states(std::span<Optimizer* const> optimizers, const std::vector<NamedTensor>& saved);

}  // namespace lockstep::optim
