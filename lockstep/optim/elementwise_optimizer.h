// The base of all optimizers: the parameters that they step on, the state and step count of each,
// and the form in which checkpoints hold these. And optimizers that update each element from
// itself, its gradient and its state.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// The rounding of a step on a weight of 16 bits.
struct NarrowStep {
  Rounding rounding = Rounding::stochastic;
  RandomBits random;           // of the weight; those of state i have key + 1 + i
  double gradient_factor = 1;  // the gradient's own 16 bits would be rounded again
};

// The numbers of one step of one parameter.
struct StepNumbers {
  double learning_rate = 0;
  double weight_decay = 0;
  std::int64_t step = 0;             // of this parameter, from 1
  std::int64_t elements_before = 0;  // of the whole parameter
  NarrowStep narrow = {};
};

// A parameter, and the state that an optimizer holds for it.
struct HeldState {
  std::string_view name;
  at::Tensor parameter;
  std::int64_t elements_before = 0;  // of the whole parameter
  const std::vector<at::Tensor>* state = nullptr;
};

// One parameter's part of a step.
struct ParameterStep {
  std::string_view name;
  StepNumbers numbers;
  // In this process's memory, all tensors are contiguous; the weight is the parameter's own or a
  // copy, which becomes the parameter's value afterwards.
  at::Tensor weight;
  at::Tensor gradient;
  const std::vector<at::Tensor>* state = nullptr;  // in the order of the state's names

  bool in_memory() const { return weight.device().is_cpu(); }
  bool is_narrow() const {
    return weight.scalar_type() == at::kHalf || weight.scalar_type() == at::kBFloat16;
  }
};

// Derived classes move the parameters.
class StatefulOptimizer : public Optimizer {
 public:
  void step(double learning_rate, const StepFactor& factor = {}) final;
  void zero_grad() final;
  std::vector<NamedTensor> state() const final;
  std::int64_t state_bytes() const final;
  void load_state(const std::vector<NamedTensor>& state) final;

 protected:
  // Whether move() takes weights of Half and BFloat16.
  enum class NarrowWeights { refused, taken };

  using MakeState = std::function<std::vector<at::Tensor>(const at::Tensor& parameter,
                                                          std::int64_t elements_before)>;

  // Holds zeros of each parameter's shape for each of the names, or what `make_state` makes.
  StatefulOptimizer(std::vector<ParameterGroup> groups, std::vector<std::string> state_names,
                    NarrowWeights narrow = NarrowWeights::refused,
                    const MakeState& make_state = {});

 private:
  struct Parameter {
    NamedParameter named;
    double weight_decay = 0;
    double learning_rate_factor = 1;
    at::ScalarType type = at::kFloat;
    NarrowStep narrow = {};
    std::int64_t step = 0;  // with the last step, which may turn out to have been left out
    bool in_last_step = false;
    std::int64_t elements_before = 0;
    std::vector<std::int64_t> sizes;
    c10::Device device = at::kCPU;
    std::vector<at::Tensor> state;
  };

  // Moves the parameters of one step. Autograd does not record it.
  virtual void move(const std::vector<ParameterStep>& steps, const StepFactor& factor) = 0;
  // Whether move() multiplies this parameter's gradient by the factor itself, and leaves the
  // parameter alone where that is 0; otherwise the gradient was multiplied before.
  virtual bool takes_factor(const ParameterStep& /*step*/) const { return false; }

  // These convert a parameter's state to the form of checkpoints, a tensor of the parameter's shape
  // for each name, and back. An optimizer with `make_state` overrides both.
  virtual std::vector<at::Tensor> saved_state(const HeldState& held) const { return *held.state; }
  virtual void take_saved(const std::vector<HeldState>& held,
                          const std::vector<std::vector<at::Tensor>>& saved);

  static HeldState held_state(const Parameter& parameter);
  void add(NamedParameter parameter, const ParameterGroup& group, const MakeState& make_state);
  // Waits for the last step's factor.
  std::int64_t num_steps(const Parameter& parameter) const;
  void settle_last_step();

  std::vector<std::string> state_names_;
  std::vector<Parameter> parameters_;
  StepFactor last_factor_;
};

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
