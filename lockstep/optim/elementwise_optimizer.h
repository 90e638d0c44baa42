// Optimizers that update each element from itself, its gradient and its state.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/optim/stateful_optimizer.h>

namespace lockstep::optim {

// A stretch of a parameter's memory, its gradient's and its state's.
template <typename T>
struct Stretch {
  std::int64_t count = 0;
  T* weight = nullptr;
  const T* gradient = nullptr;
  std::vector<T*> state;  // in the order of the state's names
};

// Derived classes have the formula: over memory, where the parameter is in this process's, and for
// tensors elsewhere, all of a step at once. On the CPU, an element's bits must not depend on its
// place in a stretch: LibTorch's operators round the last few elements of a tensor differently, so
// the formula is a loop (base/simd.h).
//
// Weights of 16 bits, and their gradients and state, are floats while the formula runs.
class ElementwiseOptimizer : public StatefulOptimizer {
 protected:
  ElementwiseOptimizer(std::vector<ParameterGroup> groups, std::vector<std::string> state_names)
      : StatefulOptimizer(std::move(groups), std::move(state_names), NarrowWeights::taken) {}

 private:
  virtual void update(const StepNumbers& numbers, const Stretch<float>& stretch) const = 0;
  virtual void update(const StepNumbers& numbers, const Stretch<double>& stretch) const = 0;
  // Multiplies the gradients of those tensors by the factor that takes_factor() says so of.
  virtual void update(const std::vector<ParameterStep>& elsewhere,
                      const StepFactor& factor) const = 0;

  void move(const std::vector<ParameterStep>& steps, const StepFactor& factor) final;
  template <typename T>
  void update_narrow(const ParameterStep& step, std::int64_t begin, std::int64_t count) const;
  void update_narrow_elsewhere(const ParameterStep& step) const;
};

// Elements that one call of a loop takes on.
inline constexpr std::int64_t kUpdateBlock = 32768;

// A parameter's memory from an element on. T is the parameter's type.
template <typename T>
Stretch<T> stretch_of(const ParameterStep& step, std::int64_t begin, std::int64_t count) {
  Stretch<T> stretch{.count = count,
                     .weight = step.weight.data_ptr<T>() + begin,
                     .gradient = step.gradient.data_ptr<T>() + begin};
  for (const at::Tensor& tensor : *step.state)
    stretch.state.push_back(tensor.data_ptr<T>() + begin);
  return stretch;
}

}  // namespace lockstep::optim
