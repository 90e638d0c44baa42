#include <ATen/ATen.h>

#include <lockstep/optim/elementwise_optimizer.h>
#include <lockstep/optim/lion/plain/kernel.h>
#include <lockstep/optim/lion/plain/options.h>

namespace lockstep::optim {

namespace {

// State: exp_avg.
class Lion final : public ElementwiseOptimizer {
 public:
  Lion(std::vector<ParameterGroup> groups, const LionOptions& options)
      : ElementwiseOptimizer(std::move(groups), options.state_names()), options_(options) {}

 private:
  template <typename T>
  void update_stretch(const StepNumbers& numbers, const Stretch<T>& stretch) const {
    const auto& [beta1, beta2] = options_.betas;
    lion_update(LionStep<T>{.beta1 = static_cast<T>(beta1),
                            .beta2 = static_cast<T>(beta2),
                            .one_minus_beta1 = static_cast<T>(1 - beta1),
                            .one_minus_beta2 = static_cast<T>(1 - beta2),
                            .learning_rate = static_cast<T>(numbers.learning_rate),
                            .keep = static_cast<T>(kept(numbers))},
                stretch.count, stretch.weight, stretch.gradient, stretch.state[0]);
  }
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override {
    update_stretch(numbers, stretch);
  }
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override {
    update_stretch(numbers, stretch);
  }

  void update(const std::vector<ParameterStep>& elsewhere, const StepFactor&) const override {
    const auto& [beta1, beta2] = options_.betas;
    for (const auto& [name, numbers, weight, gradient, state] : elsewhere) {
      const at::Tensor& average = state->front();
      const at::Tensor push = at::mul(average, beta1).add_(gradient, 1 - beta1);
      weight.mul_(kept(numbers)).add_(push.sign_(), -numbers.learning_rate);
      average.mul_(beta2).add_(gradient, 1 - beta2);
    }
  }

  static double kept(const StepNumbers& numbers) {
    return 1 - numbers.learning_rate * numbers.weight_decay;
  }

  LionOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> LionOptions::make(std::vector<ParameterGroup> groups,
                                             std::shared_ptr<Parts> /*parts*/) const {
  return std::make_unique<Lion>(std::move(groups), *this);
}

}  // namespace lockstep::optim
