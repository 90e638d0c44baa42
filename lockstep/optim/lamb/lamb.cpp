#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/optim/lamb/plain/kernel.h>
#include <lockstep/optim/lamb/plain/options.h>
#include <lockstep/optim/normed_optimizer.h>

namespace lockstep::optim {

namespace {

// State: exp_avg, exp_avg_sq.
class Lamb final : public NormedOptimizer {
 public:
  Lamb(std::vector<ParameterGroup> groups, const LambOptions& options, std::shared_ptr<Parts> parts)
      : NormedOptimizer(std::move(groups), options.state_names(), std::move(parts)),
        options_(options) {}

 private:
  template <typename T>
  void direct_stretch(const StepNumbers& numbers, const Stretch<T>& stretch, T* direction) const {
    const auto& [beta1, beta2] = options_.betas;
    lamb_direction(
        LambStep<T>{.beta1 = static_cast<T>(beta1),
                    .beta2 = static_cast<T>(beta2),
                    .one_minus_beta1 = static_cast<T>(1 - beta1),
                    .one_minus_beta2 = static_cast<T>(1 - beta2),
                    .eps_inside = static_cast<T>(options_.eps_inside_sqrt ? options_.eps : 0),
                    .eps_outside = static_cast<T>(options_.eps_inside_sqrt ? 0 : options_.eps),
                    .weight_decay = static_cast<T>(numbers.weight_decay)},
        stretch.count, stretch.weight, stretch.gradient, stretch.state[0], stretch.state[1],
        direction);
  }
  void direct(const StepNumbers& numbers, const Stretch<float>& stretch,
              float* direction) const override {
    direct_stretch(numbers, stretch, direction);
  }
  void direct(const StepNumbers& numbers, const Stretch<double>& stretch,
              double* direction) const override {
    direct_stretch(numbers, stretch, direction);
  }

  at::Tensor direction(const ParameterStep& elsewhere) const override {
    const auto& [beta1, beta2] = options_.betas;
    const at::Tensor& gradient = elsewhere.gradient;
    const at::Tensor &exp_avg = elsewhere.state->at(0), &exp_avg_sq = elsewhere.state->at(1);
    exp_avg.mul_(beta1).add_(gradient, 1 - beta1);
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, 1 - beta2);
    const at::Tensor denominator = options_.eps_inside_sqrt
                                       ? at::add(exp_avg_sq, options_.eps).sqrt_()
                                       : exp_avg_sq.sqrt().add_(options_.eps);
    return at::div(exp_avg, denominator).add_(elsewhere.weight, elsewhere.numbers.weight_decay);
  }

  double length(const StepNumbers& numbers, double weight_norm,
                double direction_norm) const override {
    const auto seen = [&](double beta) {
      return options_.bias_correction ? 1 - std::pow(beta, static_cast<double>(numbers.step)) : 1;
    };
    const double rate =
        numbers.learning_rate * std::sqrt(seen(options_.betas[1])) / seen(options_.betas[0]);
    if (weight_norm == 0 || direction_norm == 0) return rate;
    return rate * std::clamp(weight_norm / direction_norm, options_.min_coeff, options_.max_coeff);
  }

  LambOptions options_;
};

}  // namespace

std::unique_ptr<Optimizer> LambOptions::make(std::vector<ParameterGroup> groups,
                                             std::shared_ptr<Parts> parts) const {
  return std::make_unique<Lamb>(std::move(groups), *this, std::move(parts));
}

}  // namespace lockstep::optim
