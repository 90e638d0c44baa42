#include <lockstep/optim/checked_optimizer.h>

#include <utility>

namespace lockstep::optim {

namespace {

class CheckedOptimizer final : public Optimizer {
 public:
  CheckedOptimizer(std::unique_ptr<Optimizer> optimizer, OptimizerChecks checks)
      : optimizer_(std::move(optimizer)), checks_(std::move(checks)) {}

  void step(double learning_rate, const StepFactor& factor) override {
    checks_.before_use();
    checks_.before_step();
    optimizer_->step(learning_rate, factor);
  }
  void zero_grad() override {
    checks_.before_use();
    optimizer_->zero_grad();
    checks_.after_zero_grad();
  }
  std::vector<NamedTensor> state() const override {
    checks_.before_use();
    return optimizer_->state();
  }
  void load_state(const std::vector<NamedTensor>& state) override {
    checks_.before_use();
    optimizer_->load_state(state);
  }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerChecks checks_;
};

}  // namespace

std::unique_ptr<Optimizer> checked(std::unique_ptr<Optimizer> optimizer, OptimizerChecks checks) {
  return std::make_unique<CheckedOptimizer>(std::move(optimizer), std::move(checks));
}

}  // namespace lockstep::optim
