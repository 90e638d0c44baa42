#include <lockstep/optim/checked_optimizer.h>

#include <utility>

namespace lockstep::optim {

namespace {

class CheckedOptimizer final : public Optimizer {
 public:
  CheckedOptimizer(std::unique_ptr<Optimizer> optimizer, std::function<void()> before_step)
      : optimizer_(std::move(optimizer)), before_step_(std::move(before_step)) {}

  void step(double learning_rate) override {
    before_step_();
    optimizer_->step(learning_rate);
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::vector<NamedTensor> state() const override { return optimizer_->state(); }
  void load_state(const std::vector<NamedTensor>& state) override { optimizer_->load_state(state); }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  std::function<void()> before_step_;
};

}  // namespace

std::unique_ptr<Optimizer> checked(std::unique_ptr<Optimizer> optimizer,
                                   std::function<void()> before_step) {
  return std::make_unique<CheckedOptimizer>(std::move(optimizer), std::move(before_step));
}

}  // namespace lockstep::optim
