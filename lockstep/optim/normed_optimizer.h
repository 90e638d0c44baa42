// Optimizers that move a parameter along a direction, as far as norms of the whole parameter say.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/parts.h>

namespace lockstep::optim {

// Derived classes have the direction, which each element has by itself, and how far the parameter
// moves along it. The directions of a few parameters are there at once: of those of a unit, where
// parameters are cut among ranks, and otherwise of up to 64 MiB or one parameter.
class NormedOptimizer : public StatefulOptimizer {
 protected:
  // Without `parts` every parameter is whole.
  NormedOptimizer(std::vector<ParameterGroup> groups, std::vector<std::string> state_names,
                  std::shared_ptr<Parts> parts)
      : StatefulOptimizer(std::move(groups), std::move(state_names)), parts_(std::move(parts)) {}

 private:
  // Brings the state up to date, and writes the direction. See ElementwiseOptimizer.
  virtual void direct(const StepNumbers& numbers, const Stretch<float>& stretch,
                      float* direction) const = 0;
  virtual void direct(const StepNumbers& numbers, const Stretch<double>& stretch,
                      double* direction) const = 0;
  // The same for a tensor that is not in this process's memory.
  virtual at::Tensor direction(const ParameterStep& elsewhere) const = 0;
  // The factor of the direction before it is subtracted. The norms are those of the whole parameter
  // and its direction, before the step.
  virtual double length(const StepNumbers& numbers, double weight_norm,
                        double direction_norm) const = 0;

  void move(const std::vector<ParameterStep>& steps, const StepFactor& factor) final;
  void move_together(std::span<const ParameterStep> steps) const;

  std::shared_ptr<Parts> parts_;
};

}  // namespace lockstep::optim
