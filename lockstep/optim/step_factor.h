// What a step multiplies gradients by.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/device/host_memory.h>

namespace lockstep::optim {

// A number that maybe only the gradients' device knows yet. With 0 the step is left out: no
// parameter, no state and no count of steps changes.
class StepFactor {
 public:
  StepFactor() = default;  // 1
  // One Double, on any device. UsageError for another tensor.
  explicit StepFactor(const at::Tensor& factor);

  bool is_one() const { return !factor_.defined(); }
  const at::Tensor& tensor() const { return factor_; }
  // Waits until the host knows it, too.
  double value() const;

 private:
  at::Tensor factor_;  // undefined: 1
  device::HostCopy on_host_;
};

// Multiplies each of them in place.
void multiply(const std::vector<at::Tensor>& gradients, double factor);

}  // namespace lockstep::optim
