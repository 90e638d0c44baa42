// Optimizers over a model's parameters.
//
//   auto optimizer = make_optimizer(AdamWOptions{}, decay_groups(parameters, 0.1));
//   loss.backward();
//   clip_gradients(parameters, 1.0);
//   optimizer->step(schedule->learning_rate(step));
//   optimizer->zero_grad();
#pragma once

#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/device/host_memory.h>
#include <lockstep/optim/parameter_group.h>

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
// Every element is updated by itself: the bits do not depend on the number of threads, nor on how a
// parameter is cut into shards.
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

  // What a checkpoint has to save, in the parameters' order: "step.<parameter>", a Long scalar that
  // is a copy, and tensors of the parameter's shape, such as "exp_avg.<parameter>", that are the
  // optimizer's own: the next step changes them.
  virtual std::vector<NamedTensor> state() const = 0;

  // Copies in what state() gave, on whichever device it is, in any order. UsageError, with what is
  // missing, unknown or of another shape or type, where it is another optimizer's.
  virtual void load_state(const std::vector<NamedTensor>& state) = 0;
};

// How weights decay in Adam.
enum class AdamDecay {
  decoupled,  // by themselves: AdamW, DeepSpeed's adam_w_mode
  coupled,    // through the gradient: the first Adam
};

struct AdamWOptions {
  std::pair<double, double> betas = {0.9, 0.999};
  double eps = 1e-8;
  AdamDecay decay = AdamDecay::decoupled;
  // Whether moments, which begin at 0, are scaled up by how little they have seen so far.
  bool bias_correction = true;
};

// As torch::optim::SGD.
struct SGDOptions {
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
};

using OptimizerOptions = std::variant<AdamWOptions, SGDOptions>;

// UsageError, with the numbers, for options or groups that make no sense.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options,
                                          std::vector<ParameterGroup> groups);

}  // namespace lockstep::optim
