// Trains a user's own model, with the aliases and directives that such programs begin with.
#include "own_model.h"

#include <functional>

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include <lockstep/lockstep.h>

using namespace torch;
using namespace lockstep::names;
namespace nn = torch::nn;
namespace optim = torch::optim;
namespace data = torch::data;

namespace {

// Sample k is the input k/10 and the target 3·k/10.
class Line : public lockstep::data::Dataset {
 public:
  std::int64_t size() const override { return 20; }
  lockstep::data::Batch batch(std::span<const std::int64_t> indices) const override {
    const at::Tensor input = at::empty({std::ssize(indices), 1});
    for (std::size_t i = 0; i < indices.size(); ++i)
      input.data_ptr<float>()[i] = static_cast<float>(indices[i]) / 10;
    return {.input = input, .target = 3 * input};
  }
};

// A module that must not be moved, because its constructor keeps `this`.
struct Slope : nn::Module {
  Slope()
      : linear(register_module("linear", nn::Linear(nn::LinearOptions(1, 1).bias(false)))),
        run([this](const Tensor& x) { return linear(x); }) {}

  Tensor forward(const Tensor& x) { return run(x); }

  nn::Linear linear;
  std::function<Tensor(const Tensor&)> run;
};

}  // namespace

double trained_slope() {
  auto dist = setup_distributed({.mode = ParallelMode::DDP});
  DistributedTrainer trainer(
      dist, dist.wrap_model<Slope>(), nn::MSELoss(),
      {.epochs = 100, .batch_size = 20, .learning_rate = 0.1, .progress_fd = -1});
  trainer.fit(std::make_shared<Line>());
  return trainer.model()->linear->weight.item<double>();
}
