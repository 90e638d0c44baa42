// An optimizer that asks before it steps.
#pragma once

#include <functional>
#include <memory>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// Calls `before_step` at the beginning of each step, which what that throws does not take.
std::unique_ptr<Optimizer> checked(std::unique_ptr<Optimizer> optimizer,
                                   std::function<void()> before_step);

}  // namespace lockstep::optim
