// Gradient descent, with momentum where asked for.
#pragma once

#include <lockstep/optim/elementwise_optimizer.h>

namespace lockstep::optim {

// State: momentum_buffer, with momentum only.
class SGD final : public ElementwiseOptimizer {
 public:
  explicit SGD(std::vector<ParameterGroup> groups, SGDOptions options = {});

 private:
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override;
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override;
  void update(const std::vector<DeviceUpdate>& tensors, const StepFactor& factor) const override;
  bool takes_factor(const DeviceUpdate&) const override { return false; }

  SGDOptions options_;
};

}  // namespace lockstep::optim
