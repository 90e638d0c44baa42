#include <lockstep/optim/sgd.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/kernels/sgd.h>

namespace lockstep::optim {

namespace {

void check(const char* name, double value) {
  if (!std::isfinite(value) || value < 0)
    throw UsageError("SGD: {} is {}; it must be a number from 0 up", name, value);
}

// The first gradient enters the momentum whole, as torch::optim has it.
double gradient_share(const SGDOptions& options, const StepNumbers& numbers) {
  return numbers.step == 1 ? 1 : 1 - options.dampening;
}

template <typename T>
void update_stretch(const SGDOptions& options, const StepNumbers& numbers,
                    const Stretch<T>& stretch) {
  sgd_update(SgdStep<T>{.learning_rate = static_cast<T>(numbers.learning_rate),
                        .weight_decay = static_cast<T>(numbers.weight_decay),
                        .momentum = static_cast<T>(options.momentum),
                        .gradient_share = static_cast<T>(gradient_share(options, numbers)),
                        .nesterov = options.nesterov},
             stretch.count, stretch.weight, stretch.gradient,
             stretch.state.empty() ? nullptr : stretch.state[0]);
}

std::vector<std::string> state_names(const SGDOptions& options) {
  if (options.momentum == 0) return {};
  return {"momentum_buffer"};
}

}  // namespace

SGD::SGD(std::vector<ParameterGroup> groups, SGDOptions options)
    : ElementwiseOptimizer(std::move(groups), state_names(options)), options_(options) {
  check("momentum", options.momentum);
  check("dampening", options.dampening);
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0))
    throw UsageError("SGD: nesterov needs momentum above 0 and dampening 0; they are {} and {}",
                     options.momentum, options.dampening);
}

void SGD::update(const StepNumbers& numbers, const Stretch<float>& stretch) const {
  update_stretch(options_, numbers, stretch);
}

void SGD::update(const StepNumbers& numbers, const Stretch<double>& stretch) const {
  update_stretch(options_, numbers, stretch);
}

void SGD::update(const std::vector<DeviceUpdate>& tensors, const StepFactor&) const {
  for (const auto& [numbers, weight, gradient, state] : tensors) {
    const at::Tensor g =
        numbers.weight_decay == 0 ? gradient : at::add(gradient, weight, numbers.weight_decay);
    if (state->empty()) {
      weight.add_(g, -numbers.learning_rate);
      continue;
    }
    const at::Tensor& momentum = state->front();
    momentum.mul_(options_.momentum).add_(g, gradient_share(options_, numbers));
    const at::Tensor push = options_.nesterov ? at::add(g, momentum, options_.momentum) : momentum;
    weight.add_(push, -numbers.learning_rate);
  }
}

}  // namespace lockstep::optim
