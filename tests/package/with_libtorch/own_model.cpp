// Trains a model of the user's own.
#include "own_model.h"

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>

#include <lockstep/train/distributed_trainer.h>

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

}  // namespace

double trained_slope() {
  auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::DDP});
  lockstep::DistributedTrainer trainer(
      dist, torch::nn::Linear(torch::nn::LinearOptions(1, 1).bias(false)), torch::nn::MSELoss(),
      {.epochs = 100, .batch_size = 20, .learning_rate = 0.1, .progress_fd = -1});
  trainer.fit(std::make_shared<Line>());
  return trainer.model()->weight.item<double>();
}
