// Where the global random number generators stand.
#pragma once

#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace lockstep::activations {

// The CPU's, and that of each GPU which this process uses. Taking and restoring a state is work of
// the host and waits for no device. Threading: holds each generator's mutex while it looks at it;
// what other threads draw between taking a state and restoring it is drawn again.
class GeneratorStates {
 public:
  static GeneratorStates now();

  void restore() const;

 private:
  struct State {
    at::Generator generator;
    at::Tensor value;
  };
  std::vector<State> states_;
};

}  // namespace lockstep::activations
