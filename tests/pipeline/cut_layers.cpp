// Backward in two halves, for layers that a tensor axis cuts.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/utils.h>

#include <lockstep/nn/tensor_parallel/tensor_parallel.h>
#include <lockstep/nn/tensor_parallel/tensor_plan.h>
#include <lockstep/parallel/pipeline/split_backward.h>

#include "counted.h"
#include "executor.h"

namespace lockstep::pipeline {

namespace {

struct CutMlp : torch::nn::Module {
  CutMlp()
      : up(register_module("up", lockstep::nn::ColumnParallelLinear(8, 16))),
        down(register_module("down", lockstep::nn::RowParallelLinear(16, 8))) {}

  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }

  lockstep::nn::ColumnParallelLinear up;
  lockstep::nn::RowParallelLinear down;
};

void check_halves_of(ranks::Cells& cells, lockstep::nn::BetweenLayers between) {
  torch::manual_seed(4);
  CutMlp model;
  lockstep::nn::cut_parallel_layers(
      model, std::make_shared<lockstep::nn::TensorAxis>(cells.group(), between));
  const at::Tensor input = at::randn({3, 4, 8}).requires_grad_();
  const at::Tensor slope = at::randn({3, 4, 8});
  model.forward(input).backward(slope);
  std::vector<at::Tensor> wanted = {input.grad().clone()};
  for (const at::Tensor& parameter : model.parameters()) wanted.push_back(parameter.grad().clone());
  for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad() = at::Tensor();
  input.mutable_grad() = at::Tensor();

  const at::Tensor output = model.forward(input);
  const Counted products("aten::mm");
  WeightHalf rest = SplitBackward(model).backward_input({output}, {slope});
  const int of_inputs = products.take();
  cells.expect_same(input.grad(), wanted[0], "the input's gradient");
  for (const auto& item : model.named_parameters())
    cells.expect(!item.value().grad().defined(), item.key() + " came with the first half");
  rest.run();
  const int of_weights = products.take();
  std::size_t next = 1;
  for (const auto& item : model.named_parameters())
    cells.expect_same(item.value().grad(), wanted[next++], item.key());
  cells.expect(of_inputs == 2 && of_weights == 2,
               fmt::format("{} products in the first half and {} in the second, not 2 and 2",
                           of_inputs, of_weights));
}

}  // namespace

void check_cut_layers(ranks::Cells& cells) {
  cells.cell("layers that ranks share, in halves",
             [&] { check_halves_of(cells, lockstep::nn::BetweenLayers::whole); });
  cells.cell("sequences that they share, too",
             [&] { check_halves_of(cells, lockstep::nn::BetweenLayers::by_positions); });
}

}  // namespace lockstep::pipeline
