// Optimizers over a model's parameters.
//
//   auto optimizer = make_optimizer(AdamWOptions{}, decay_groups(parameters, 0.1));
//   loss.backward();
//   clip_gradients(parameters, 1.0);
//   optimizer->step(schedule->learning_rate(step));
//   optimizer->zero_grad();
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/device/host_memory.h>
#include <lockstep/optim/parameters.h>
#include <lockstep/optim/parts.h>
#include <lockstep/optim/registry/optimizers.h>
#include <lockstep/optim/registry/registry.h>

namespace lockstep::optim {

// A step multiplies gradients by this number, which maybe only their device knows yet. With 0 the
// step is left out: no parameter, no state and no count of steps changes.
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

// Shares the parameters with the model and owns the state, which it takes memory for when it is
// made. Parameters are Float or Double, on any device, each its own. For one thread at a time. A
// UsageError leaves parameters and state as they were.
//
// The bits do not depend on how a parameter is cut into shards, nor on the number of threads,
// unless an optimizer multiplies matrices (MatrixOptimizer).
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  // Moves each parameter that has a gradient by one step; the others stay, and their state too.
  // Gradients are multiplied by the factor, and may be in place. For that, AdamW does not wait for
  // a GPU that its tensors are on, contiguous ones, but for the factor of the step before;
  // otherwise the host waits for a factor that it does not know.
  virtual void step(double learning_rate, const StepFactor& factor = {}) = 0;

  // Leaves every gradient undefined.
  virtual void zero_grad() = 0;

  // The state that a checkpoint saves, by the parameters' names: "step.<parameter>", a Long scalar
  // that is a copy, and tensors of the parameter's shape, such as "exp_avg.<parameter>", that are
  // the optimizer's own: the next step changes them. State of 8 bits comes as floats, in copies.
  virtual std::vector<NamedTensor> state() const = 0;

  // Bytes of state that this rank holds.
  virtual std::int64_t state_bytes() const;

  // Copies in what state() gave, on whichever device it is, in any order. UsageError, with what is
  // missing, unknown or of another shape or type, where it is another optimizer's.
  virtual void load_state(const std::vector<NamedTensor>& state) = 0;
};

// UsageError, with the numbers, for options or groups that make no sense. Where the parameters are
// parts of larger ones, `parts` asks the ranks that have the others.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups,
                                          std::shared_ptr<Parts> parts = nullptr);

// Makes an optimizer from options of a type.
using OptimizerMaker = std::function<std::unique_ptr<Optimizer>(const OptimizerOptions& options,
                                                                std::vector<ParameterGroup> groups,
                                                                std::shared_ptr<Parts> parts)>;

void register_optimizer_maker(std::type_index options, OptimizerMaker maker);

// An optimizer of a program's own, for as long as the process runs: make_optimizer() takes such
// options from now on, and configs name it in "optimizer": {"type": …, "params": {…}}. Call it
// before a config is read. UsageError where a name is taken.
//
//   optim::register_optimizer({"Mine"}, MyOptions{});
template <typename Options>
requires DescribesOptimizer<Options>
void register_optimizer(std::vector<std::string> names, Options defaults) {
  register_optimizer_type({std::move(names), defaults});
  register_optimizer_maker(
      typeid(Options), [](const OptimizerOptions& options, std::vector<ParameterGroup> groups,
                          std::shared_ptr<Parts> parts) {
        return options.as<Options>()->make(std::move(groups), std::move(parts));
      });
}

}  // namespace lockstep::optim
