#include <thread>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/replicate/sync_batch_norm.h>

#include "tables.h"
#include "twins.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

void check_between(Cells& cells) {
  cells.cell("evaluation between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [&](Chain& model, int step) {
      const c10::NoGradGuard no_grad;
      return model->forward(input_of(cells, 50 + step));
    });
  });
  cells.cell("evaluation in inference mode between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [&](Chain& model, int step) {
      at::Tensor result;
      {
        const c10::InferenceMode inference;
        result =
            model->forward(input_of(cells, 50 + step)) + model->layer(0).weight.t().select(0, 1);
      }
      return result.clone();
    });
  });
  cells.cell("evaluation between forward and backward", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime)
        .train([&](Chain& model, const at::Tensor& input) {
          const at::Tensor loss = forward_loss(model, input);
          const c10::NoGradGuard no_grad;
          model->forward(input * 3);
          return loss;
        });
  });
  cells.cell("edits in place between steps", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [](Chain& model, int step) {
      const c10::NoGradGuard no_grad;
      model->layer(0).weight.mul_(1.5);
      model->layer(1).weight[2].fill_(0.25 * step);
      model->layer(1).bias.copy_(model->layer(0).bias);
      model->layer(2).weight.t().slice(0, 1, 3).add_(1);
      model->layer(2).bias.data().sub_(0.5);
      at::clamp_out(model->layer(0).bias, model->layer(0).bias, -0.1, 0.1);
      return model->layer(0).weight.sum() + model->layer(2).weight.sum();
    });
  });
  cells.cell("weights drawn anew after wrapping", [&] {
    Twins<Chain>(cells, three_layers, kOneAtATime).train(forward_loss, [](Chain& model, int step) {
      torch::manual_seed(static_cast<std::uint64_t>(step));
      for (std::size_t layer = 0; layer < 3; ++layer)
        nn::init::xavier_uniform_(model->layer(layer).weight);
      return model->layer(1).weight.detach().clone();
    });
  });
  cells.cell("edits through pointers", [&] {
    Twins<Chain> twins(cells, three_layers, kOneAtATime);
    twins.train(forward_loss, [&](Chain& model, int step) {
      std::shared_ptr<void> hold;
      if (&model == &twins.model()) hold = twins.parallel().full_parameters();
      double sum = 0;
      for (at::Tensor& parameter : model->parameters()) {
        auto* const values = static_cast<float*>(parameter.data_ptr());
        values[parameter.numel() - 1] = 0.1f * static_cast<float>(step);
        for (std::int64_t at = 0; at < parameter.numel(); ++at) sum += values[at];
      }
      return at::tensor(sum, at::kDouble);
    });
  });
  cells.cell("a deep copy of what a parameter is", [&] {
    Twins<Chain> twins(cells, three_layers, kOneAtATime);
    std::vector<at::Tensor> average;  // of weights, as many programs keep one
    for (const at::Tensor& parameter : twins.model()->parameters())
      average.push_back(parameter.detach().clone());
    twins.train(forward_loss);
    const auto twin = twins.twin()->parameters();
    std::size_t index = 0;
    for (const at::Tensor& parameter : twins.model()->parameters()) {
      const c10::NoGradGuard no_grad;
      const at::Tensor now = parameter.detach().clone();
      cells.expect_same(now, twin[index], "a clone");
      cells.expect(average[index].isfinite().all().item<bool>(), "an old clone is gone");
      cells.expect(!at::equal(average[index], now), "an old clone follows the parameter");
      ++index;
    }
  });
}

void check_autograd(Cells& cells) {
  cells.cell("torch::autograd::grad() is this rank's own", [&] {
    torch::manual_seed(2);
    Chain alone(3);
    torch::manual_seed(2);
    Chain model(3);
    const FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const auto gradients = [&](Chain& net) {
      const at::Tensor input = input_of(cells, 1).requires_grad_();
      return torch::autograd::grad({forward_loss(net, input)},
                                   {net->layer(0).weight, net->layer(2).bias, input});
    };
    for (int round = 0; round < 2; ++round) {
      const auto got = gradients(model);
      const auto wanted = gradients(alone);
      for (std::size_t index = 0; index < wanted.size(); ++index)
        cells.expect_same(got[index], wanted[index], fmt::format("gradient {}", index));
      cells.expect(!model->layer(0).weight.grad().defined(), "a gradient was kept");
    }
  });
  cells.cell("a penalty on the gradient of the input", [&] {
    torch::manual_seed(2);
    Chain alone(2);
    torch::manual_seed(2);
    Chain model(2);
    const FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const auto penalty = [&](Chain& net) {
      const at::Tensor input = input_of(cells, 1).requires_grad_();
      return torch::autograd::grad({forward_loss(net, input)}, {input}, {},
                                   /*retain_graph=*/true, /*create_graph=*/true)[0]
          .pow(2)
          .sum();
    };
    const at::Tensor wanted = torch::autograd::grad({penalty(alone)}, {alone->layer(0).weight})[0];
    cells.expect_same(torch::autograd::grad({penalty(model)}, {model->layer(0).weight})[0], wanted,
                      "the gradient of a gradient");
  });
  cells.cell("a backward that comes after the step", [&] {
    for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
      Chain model(3);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      const auto optimizer = adamw(parallel, *model);
      forward_loss(model, input_of(cells, 0)).backward();
      const at::Tensor late = forward_loss(model, input_of(cells, 1));
      optimizer->step(0.1);
      try {
        late.backward();
        cells.expect(false, "backward used weights of two steps");
      } catch (const c10::Error& error) {
        cells.expect(
            std::string(error.what()).find("modified by an inplace operation") != std::string::npos,
            fmt::format("it says {}", error.what_without_backtrace()));
      }
    }
  });
  cells.cell("the same graph twice", [&] {
    torch::manual_seed(2);
    Chain alone(3);
    torch::manual_seed(2);
    Chain model(3);
    FullyShardedDataParallel parallel = sharded(cells, *model, kOneAtATime);
    const at::Tensor input = at::ones({2, 5});
    const at::Tensor loss = forward_loss(model, input);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    const at::Tensor wanted = forward_loss(alone, input) * 2;
    wanted.backward();
    for (const auto& item : alone->named_parameters())
      cells.expect_close(parallel.full_gradient(item.key()), item.value().grad(), item.key());
  });
}

}  // namespace

void check_any_program(Cells& cells) {
  check_between(cells);
  check_autograd(cells);
}

}  // namespace lockstep::shard
