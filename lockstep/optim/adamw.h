// AdamW, and Adam with its coupled decay.
#pragma once

#include <lockstep/optim/elementwise_optimizer.h>

namespace lockstep::optim {

// State: exp_avg, exp_avg_sq. Its kernel reads weight, gradient and state once and writes them
// once.
class AdamW final : public ElementwiseOptimizer {
 public:
  explicit AdamW(std::vector<ParameterGroup> groups, AdamWOptions options = {});

 private:
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override;
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override;
  void update(const std::vector<DeviceUpdate>& tensors, const StepFactor& factor) const override;
  bool takes_factor(const DeviceUpdate& tensor) const override;

  AdamWOptions options_;
};

}  // namespace lockstep::optim
