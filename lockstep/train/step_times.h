// Where a step's time goes.
#pragma once

#include <chrono>

#include <c10/core/Device.h>

namespace lockstep::train {

// Seconds of one step on this rank. Backward holds the exchange of gradients, and with it the wait
// for ranks that come later.
struct StepTimes {
  double data = 0;
  double forward = 0;
  double backward = 0;
  double update = 0;
};

// Gives the time since it was last asked to one part after the other. Waits for a CUDA
// device first: it computes on after calls return.
class PartClock {
 public:
  explicit PartClock(c10::Device device);

  void add_to(double& part);

 private:
  c10::Device device_;
  std::chrono::steady_clock::time_point since_;
};

}  // namespace lockstep::train
