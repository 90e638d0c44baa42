// An optimizer that asks before it does anything, and tells what it has done to gradients.
#pragma once

#include <functional>
#include <memory>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// The optimizer calls these before it acts, and does nothing where one of them throws.
struct OptimizerChecks {
  std::function<void()> before_use;   // before every method
  std::function<void()> before_step;  // before step(), after before_use
  std::function<void()> after_zero_grad;
};

std::unique_ptr<Optimizer> checked(std::unique_ptr<Optimizer> optimizer, OptimizerChecks checks);

}  // namespace lockstep::optim
