#include <lockstep/optim/joined_optimizer.h>

#include <utility>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/optim/parameters.h>

namespace lockstep::optim {

namespace {

class JoinedOptimizer final : public Optimizer {
 public:
  explicit JoinedOptimizer(std::vector<std::unique_ptr<Optimizer>> optimizers)
      : optimizers_(std::move(optimizers)) {}

  void step(double learning_rate, const StepFactor& factor) override {
    for (const auto& one : optimizers_) one->step(learning_rate, factor);
  }
  void zero_grad() override {
    for (const auto& one : optimizers_) one->zero_grad();
  }
  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> all;
    for (const auto& one : optimizers_)
      for (NamedTensor& tensor : one->state()) all.push_back(std::move(tensor));
    return all;
  }
  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& one : optimizers_) bytes += one->state_bytes();
    return bytes;
  }
  void load_state(const std::vector<NamedTensor>& state) override {
    std::vector<Optimizer*> each;
    for (const auto& one : optimizers_) each.push_back(one.get());
    load_states(each, state);
  }

 private:
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

}  // namespace

void load_states(std::span<Optimizer* const> optimizers, const std::vector<NamedTensor>& saved) {
  std::vector<NamedTensor> known;
  for (const Optimizer* one : optimizers)
    for (NamedTensor& tensor : one->state()) known.push_back(std::move(tensor));
  std::vector<at::Tensor> matched = match_saved_state(known, saved);
  for (std::size_t i = 0; i < known.size(); ++i)
    if (known[i].tensor.dim() == 0 && matched[i].item<std::int64_t>() < 0)
      throw UsageError("the saved state has {} as {}: a count from 0 is needed",
                       matched[i].item<std::int64_t>(), known[i].name);
  auto next = matched.begin();
  for (Optimizer* one : optimizers) {
    std::vector<NamedTensor> mine = one->state();
    for (NamedTensor& tensor : mine) tensor.tensor = std::move(*next++);
    one->load_state(mine);
  }
}

std::unique_ptr<Optimizer> joined(std::vector<std::unique_ptr<Optimizer>> optimizers) {
  return std::make_unique<JoinedOptimizer>(std::move(optimizers));
}

}  // namespace lockstep::optim
