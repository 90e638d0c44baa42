#include <lockstep/optim/counted_optimizer.h>

#include <utility>

namespace lockstep::optim {

namespace {

class CountedOptimizer final : public Optimizer {
 public:
  CountedOptimizer(std::unique_ptr<Optimizer> optimizer, std::shared_ptr<std::int64_t> total)
      : optimizer_(std::move(optimizer)), total_(std::move(total)) {
    for (const NamedTensor& one : optimizer_->state())
      bytes_ += static_cast<std::int64_t>(one.tensor.nbytes());
    *total_ += bytes_;
  }
  ~CountedOptimizer() override { *total_ -= bytes_; }

  void step(double learning_rate, const StepFactor& factor) override {
    optimizer_->step(learning_rate, factor);
  }
  void zero_grad() override { optimizer_->zero_grad(); }
  std::vector<NamedTensor> state() const override { return optimizer_->state(); }
  void load_state(const std::vector<NamedTensor>& state) override { optimizer_->load_state(state); }

 private:
  std::unique_ptr<Optimizer> optimizer_;
  std::shared_ptr<std::int64_t> total_;
  std::int64_t bytes_ = 0;
};

}  // namespace

std::unique_ptr<Optimizer> counted(std::unique_ptr<Optimizer> optimizer,
                                   std::shared_ptr<std::int64_t> total) {
  return std::make_unique<CountedOptimizer>(std::move(optimizer), std::move(total));
}

}  // namespace lockstep::optim
