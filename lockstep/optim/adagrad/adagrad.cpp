#include <ATen/ATen.h>

#include <lockstep/optim/adagrad/plain/kernel.h>
#include <lockstep/optim/adagrad/plain/options.h>
#include <lockstep/optim/elementwise_optimizer.h>

namespace lockstep::optim {

namespace {

// State: sum, of the squares of all gradients.
class Adagrad final : public ElementwiseOptimizer {
 public:
  Adagrad(std::vector<ParameterGroup> groups, const AdagradOptions& options)
      : ElementwiseOptimizer(std::move(groups), options.state_names()), options_(options) {}

 private:
  template <typename T>
  void update_stretch(const StepNumbers& numbers, const Stretch<T>& stretch) const {
    adagrad_update(AdagradStep<T>{.learning_rate = static_cast<T>(decayed_rate(numbers)),
                                  .weight_decay = static_cast<T>(numbers.weight_decay),
                                  .eps = static_cast<T>(options_.eps)},
                   stretch.count, stretch.weight, stretch.gradient, stretch.state[0]);
  }
  void update(const StepNumbers& numbers, const Stretch<float>& stretch) const override {
    update_stretch(numbers, stretch);
  }
  void update(const StepNumbers& numbers, const Stretch<double>& stretch) const override {
    update_stretch(numbers, stretch);
  }

  void update(const std::vector<ParameterStep>& elsewhere, const StepFactor&) const override {
    for (const auto& [name, numbers, weight, gradient, state] : elsewhere) {
      const at::Tensor g =
          numbers.weight_decay == 0 ? gradient : at::add(gradient, weight, numbers.weight_decay);
      const at::Tensor& sum = state->front();
      sum.addcmul_(g, g);
      weight.addcdiv_(g, sum.sqrt().add_(options_.eps), -decayed_rate(numbers));
    }
  }

  double decayed_rate(const StepNumbers& numbers) const {
    return numbers.learning_rate / (1 + static_cast<double>(numbers.step - 1) * options_.lr_decay);
  }

  AdagradOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> AdagradOptions::make(std::vector<ParameterGroup> groups,
                                                std::shared_ptr<Parts> /*parts*/) const {
  return std::make_unique<Adagrad>(std::move(groups), *this);
}

}  // namespace lockstep::optim
