// A sharded model beside a replicated one.
#pragma once

#include <functional>
#include <memory>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>

#include "chain.h"

namespace lockstep::shard {

inline at::Tensor input_of(const ranks::Cells& cells, int step, std::int64_t width = 5) {
  torch::manual_seed(static_cast<std::uint64_t>(1000 * step + cells.rank()));
  return at::randn({3, width});
}

// Trains a sharded model beside a replicated one; they must agree to the bit. `loss` is one pass
// over this rank's input; `between` runs after each step, for both models.
template <typename Model>
class Twins {
 public:
  using Make = std::function<Model()>;
  using Loss = std::function<at::Tensor(Model&, const at::Tensor& input)>;
  using Between = std::function<at::Tensor(Model&, int step)>;

  Twins(ranks::Cells& cells, Make make, Options options = {})
      : cells_(cells),
        model_(seeded(make)),
        twin_(seeded(make)),
        sharded_(*model_, shard_over(cells.group()), scrubbed(std::move(options))),
        replicated_(*twin_, cells.group()),
        optimizer_(adamw(sharded_, *model_)),
        twin_optimizer_(optim::make_optimizer(
            optim::AdamWOptions{},
            optim::decay_groups(data_parallel::trained_parameters(*twin_), 0.1))) {}

  Model& model() { return model_; }
  Model& twin() { return twin_; }
  FullyShardedDataParallel& parallel() { return sharded_; }

  void train(const Loss& loss, const Between& between = {}) {
    for (int step = 0; step < 4; ++step) {
      const at::Tensor input = input_of(cells_, step);
      optimizer_->zero_grad();
      twin_optimizer_->zero_grad();
      const at::Tensor got = loss(model_, input);
      const at::Tensor wanted = loss(twin_, input);
      cells_.expect_same(got.detach(), wanted.detach(), fmt::format("step {}: the loss", step));
      got.backward();
      wanted.backward();
      for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin_))
        cells_.expect_same(sharded_.full_gradient(name), parameter.grad(),
                           fmt::format("step {}: the gradient of {}", step, name));
      optimizer_->step(0.05);
      twin_optimizer_->step(0.05);
      if (between)
        cells_.expect_same(between(model_, step), between(twin_, step),
                           fmt::format("step {}: what came between", step));
    }
    const auto expected = twin_->named_parameters();
    for (const auto& [name, tensor] : sharded_.full_state_dict({.rank0_only = false}))
      if (expected.contains(name)) cells_.expect_same(tensor, expected[name], name);
  }

 private:
  static Model seeded(const Make& make) {
    torch::manual_seed(11);
    return make();
  }

  ranks::Cells& cells_;
  Model model_;
  Model twin_;
  FullyShardedDataParallel sharded_;
  replicate::DistributedDataParallel replicated_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  std::unique_ptr<optim::Optimizer> twin_optimizer_;
};

inline const Options kOneAtATime = {.max_live_units = 1};

inline Chain two_layers() { return Chain(2); }
inline Chain three_layers() { return Chain(3); }

inline at::Tensor forward_loss(Chain& model, const at::Tensor& input) {
  return model->forward(input).pow(2).mean();
}

}  // namespace lockstep::shard
