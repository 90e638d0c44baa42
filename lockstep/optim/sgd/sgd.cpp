#include <ATen/ATen.h>

#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/sgd/plain/kernel.h>
#include <lockstep/optim/sgd/plain/options.h>

namespace lockstep::optim {

namespace {

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

// State: momentum_buffer, with momentum only.
class SGD final : public ElementwiseOptimizer {
 public:
  SGD(std::vector<ParameterGroup> groups, const SGDOptions& options)
      : ElementwiseOptimizer(std::move(groups), options.state_names()), options_(options) {}

 private:
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override {
    update_stretch(options_, numbers, stretch);
  }
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override {
    update_stretch(options_, numbers, stretch);
  }

  void update(const std::vector<ParameterStep>& elsewhere, const StepFactor&) const override {
    for (const auto& [name, numbers, weight, gradient, state] : elsewhere) {
      const at::Tensor g =
          numbers.weight_decay == 0 ? gradient : at::add(gradient, weight, numbers.weight_decay);
      if (state->empty()) {
        weight.add_(g, -numbers.learning_rate);
        continue;
      }
      const at::Tensor& momentum = state->front();
      momentum.mul_(options_.momentum).add_(g, gradient_share(options_, numbers));
      const at::Tensor push =
          options_.nesterov ? at::add(g, momentum, options_.momentum) : momentum;
      weight.add_(push, -numbers.learning_rate);
    }
  }

  SGDOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> SGDOptions::make(std::vector<ParameterGroup> groups,
                                            std::shared_ptr<Parts> /*parts*/) const {
  return std::make_unique<SGD>(std::move(groups), *this);
}

}  // namespace lockstep::optim
