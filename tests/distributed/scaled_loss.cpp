#include "scaled_loss.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <lockstep/distributed/config_rules.h>

namespace lockstep {

namespace {

using ranks::Cells;
using torch::nn::Linear;
using torch::nn::Sequential;

constexpr int kSteps = 3;
constexpr int kSamples = 4;

Sequential seeded() {
  torch::manual_seed(3);
  return Sequential(Linear(6, 6), Linear(6, 6), Linear(6, 2));
}

at::Tensor loss_sum(const DistributedManager& dist, Sequential& model, int step) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + dist.rank()));
  return model->forward(at::randn({kSamples, 6})).pow(2).sum();
}

std::vector<NamedTensor> weights(DistributedManager& dist, const Sequential& model) {
  auto state = dist.full_state_dict(model, {.rank0_only = false});
  for (NamedTensor& one : state) one.tensor = one.tensor.detach().clone();
  return state;
}

// The weights after a few steps, and the loss of the last step.
struct Trained {
  std::vector<NamedTensor> weights;
  double loss = 0;
};

Trained train_plainly(DistributedManager& dist) {
  Sequential model = dist.wrap_model(seeded());
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
  for (int step = 0; step < kSteps; ++step) {
    adamw->zero_grad();
    dist.backward(model, loss_sum(dist, model, step), kSamples);
    dist.clip_gradients(model, 0.5);
    adamw->step(0.05);
  }
  return {weights(dist, model), dist.totals(model).mean_loss()};
}

void expect_same(Cells& cells, const std::vector<NamedTensor>& got,
                 const std::vector<NamedTensor>& wanted) {
  cells.expect(got.size() == wanted.size() && !got.empty(), "other tensors");
  for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i)
    cells.expect_same(got[i].tensor, wanted[i].tensor, wanted[i].name);
}

}  // namespace

void check_scaled_loss(DistributedManager dist, Cells& cells) {
  cells.cell("a scaled loss gives the same steps, to the bit", [&] {
    const Trained plain = train_plainly(dist);
    Sequential model = dist.wrap_model(seeded());
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
    GradScaler scaler({.initial_scale_power = 10});
    scaler.set_samples_per_sum(kSamples);
    for (int step = 0; step < kSteps; ++step) {
      adamw->zero_grad();
      dist.backward(model, scaler.scale_gradients_of(loss_sum(dist, model, step)), kSamples);
      cells.expect(dist.unscale_gradients(model, scaler), "a step was skipped");
      dist.clip_gradients(model, 0.5);
      adamw->step(0.05);
    }
    expect_same(cells, weights(dist, model), plain.weights);
    cells.expect(dist.totals(model).mean_loss() == plain.loss, "the loss is not the unscaled one");
  });

  cells.cell("an overflow on one rank skips the step on all, and moves the scale on", [&] {
    Sequential model = dist.wrap_model(seeded());
    GradScaler scaler({.initial_scale_power = 10, .hysteresis = 1});
    const bool last = dist.rank() == dist.world_size() - 1;
    const double factor = last ? std::numeric_limits<float>::infinity() : 1;
    dist.backward(model, scaler.scale(loss_sum(dist, model, 0)) * factor, kSamples);
    cells.expect(!dist.unscale_gradients(model, scaler), "the step was not skipped");
    cells.expect(scaler.loss_scale() == 512, fmt::format("the scale is {}", scaler.loss_scale()));
  });

  cells.cell("an overflow that only one rank's gradients show", [&] {
    Sequential model = dist.wrap_model(seeded());
    GradScaler scaler({.initial_scale_power = 10, .hysteresis = 1});
    dist.backward(model, scaler.scale(loss_sum(dist, model, 0)), kSamples);
    if (takes_units(dist.config())) return;  // there are no gradients that a caller could write to
    if (dist.rank() == dist.world_size() - 1)
      model->parameters().front().grad().fill_(std::numeric_limits<float>::infinity());
    cells.expect(!dist.unscale_gradients(model, scaler), "ranks do not agree");
    cells.expect(scaler.loss_scale() == 512, fmt::format("the scale is {}", scaler.loss_scale()));
  });
}

}  // namespace lockstep
