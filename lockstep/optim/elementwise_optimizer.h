// What optimizers share that update each element from itself, its gradient and a state of the same
// shape: which parameters, in which memory, on which threads, and what a checkpoint holds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <lockstep/optim/optimizer.h>

namespace lockstep::optim {

// The numbers of one step of one parameter.
struct StepNumbers {
  double learning_rate = 0;
  double weight_decay = 0;
  std::int64_t step = 0;  // of this parameter, from 1
};

// A stretch of a parameter's memory, its gradient's and its state's.
template <typename T>
struct Stretch {
  std::int64_t count = 0;
  T* weight = nullptr;
  const T* gradient = nullptr;
  std::vector<T*> state;  // in the order of the state's names
};

// A parameter on another device, with its gradient and its state in the order of the state's names.
struct DeviceUpdate {
  StepNumbers numbers;
  at::Tensor weight;
  at::Tensor gradient;
  const std::vector<at::Tensor>* state = nullptr;
};

// Derived classes have the formula: over memory, where the parameter is in this process's, and for
// tensors elsewhere, all of a step at once. Both are called with no autograd recording.
class ElementwiseOptimizer : public Optimizer {
 public:
  void step(double learning_rate, const StepFactor& factor = {}) final;
  void zero_grad() final;
  std::vector<NamedTensor> state() const final;
  void load_state(const std::vector<NamedTensor>& state) final;

 protected:
  // Zeros of each parameter's shape for each of the names.
  ElementwiseOptimizer(std::vector<ParameterGroup> groups, std::vector<std::string> state_names);

 private:
  struct Parameter {
    NamedParameter named;
    double weight_decay = 0;
    double learning_rate_factor = 1;
    std::int64_t step = 0;  // with the last step, which may turn out to have been left out
    bool in_last_step = false;
    std::vector<at::Tensor> state;
  };
  struct Update;

  virtual void update(const StepNumbers& numbers, const Stretch<float>& stretch) const = 0;
  virtual void update(const StepNumbers& numbers, const Stretch<double>& stretch) const = 0;
  // Multiplies the gradients of those tensors by the factor that takes_factor() says so of.
  virtual void update(const std::vector<DeviceUpdate>& tensors, const StepFactor& factor) const = 0;
  virtual bool takes_factor(const DeviceUpdate& tensor) const = 0;

  void add(NamedParameter parameter, const ParameterGroup& group);
  // Waits for the last step's factor.
  std::int64_t num_steps(const Parameter& parameter) const;
  void settle_last_step();
  std::vector<Update> updates(double learning_rate);
  void update_block(const Update& update, std::int64_t begin, std::int64_t count) const;

  std::vector<std::string> state_names_;
  std::vector<Parameter> parameters_;
  StepFactor last_factor_;
};

}  // namespace lockstep::optim
