// An optimizer that asks before it does anything.
#pragma once

#include <functional>
#include <memory>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// What they throw keeps the optimizer from doing it.
struct OptimizerChecks {
  std::function<void()> before_use;   // of any kind
  std::function<void()> before_step;  // after before_use
};

std::unique_ptr<Optimizer> checked(std::unique_ptr<Optimizer> optimizer, OptimizerChecks checks);

}  // namespace lockstep::optim
