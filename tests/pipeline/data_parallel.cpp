#include "data_parallel.h"

#include <map>
#include <memory>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/parallel/pipeline/split_backward.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/fully_sharded_data_parallel.h>

namespace lockstep::pipeline {

namespace {

namespace nn = torch::nn;

constexpr int kMicroBatches = 3;

struct BlockImpl : nn::Module {
  nn::Linear up = register_module("up", nn::Linear(8, 24));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({24})));
  nn::Linear down = register_module("down", nn::Linear(24, 8));

  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::tanh(norm->forward(up->forward(x))));
  }
};
TORCH_MODULE(Block);

struct StackImpl : nn::Module {
  nn::Embedding table = register_module("table", nn::Embedding(13, 8));
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList(Block(), Block(), Block()));
  nn::Conv1d mix = register_module("mix", nn::Conv1d(nn::Conv1dOptions(5, 5, 3).padding(1)));

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = mix->forward(table->forward(tokens));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x.matmul(table->weight.t()).square().mean();
  }
};
TORCH_MODULE(Stack);

Stack seeded_stack() {
  torch::manual_seed(4);
  return Stack();
}

at::Tensor tokens_of(const ranks::Cells& cells, int micro_batch) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * micro_batch + cells.rank()));
  return at::randint(0, 13, {2, 5});
}

// Runs whole backward passes over the micro-batches and exchanges gradients in the last one.
template <typename Parallel>
void whole_passes(const ranks::Cells& cells, Stack& model, Parallel& parallel) {
  for (int i = 0; i < kMicroBatches; ++i) {
    auto local = std::make_unique<data_parallel::NoSync>(parallel.no_sync());
    if (i == kMicroBatches - 1) local.reset();
    model->forward(tokens_of(cells, i)).backward();
  }
}

// Runs the halves in the order B0 B1 W0 B2 W1 W2.
template <typename Parallel>
void halved_passes(const ranks::Cells& cells, Stack& model, Parallel& parallel) {
  const SplitBackward split(*model);
  std::map<int, WeightHalf> rest;
  const auto first_half = [&](int i) {
    rest[i] = split.backward_input({model->forward(tokens_of(cells, i))}, {at::Tensor()});
  };
  {
    const auto local = parallel.no_sync();
    first_half(0);
    for (int i = 0; i < kMicroBatches - 1; ++i) {
      first_half(i + 1);
      rest[i].run();
    }
  }
  rest[kMicroBatches - 1].run();
}

}  // namespace

void check_data_parallel(ranks::Cells& cells) {
  cells.cell("replicated", [&] {
    Stack model = seeded_stack(), twin = seeded_stack();
    replicate::DistributedDataParallel parallel(*model, cells.group());
    replicate::DistributedDataParallel twin_parallel(*twin, cells.group());
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      twin->zero_grad();
      halved_passes(cells, model, parallel);
      whole_passes(cells, twin, twin_parallel);
      for (const auto& item : twin->named_parameters())
        cells.expect_same(model->named_parameters()[item.key()].grad(), item.value().grad(),
                          item.key());
      cells.expect(parallel.gradients().num_exchanges() == step + 1, "not one exchange a step");
    }
  });
  for (const auto cut : {shard::Cut::gradients_and_parameters, shard::Cut::gradients}) {
    const bool whole = cut == shard::Cut::gradients;
    cells.cell(whole ? "gradients sharded" : "parameters sharded", [&] {
      Stack model = seeded_stack(), twin = seeded_stack();
      shard::FullyShardedDataParallel parallel(*model, shard::shard_over(cells.group()),
                                               {.cut = cut, .scrub_freed_memory = true});
      replicate::DistributedDataParallel twin_parallel(*twin, cells.group());
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        twin->zero_grad();
        halved_passes(cells, model, parallel);
        whole_passes(cells, twin, twin_parallel);
        for (const auto& [name, parameter] : data_parallel::trained_parameters(*twin))
          cells.expect_same(parallel.full_gradient(name), parameter.grad(), name);
      }
    });
  }
  cells.cell("second halves of products gather nothing", [&] {
    nn::Sequential model{Block(), Block(), Block()};
    shard::FullyShardedDataParallel parallel(*model, shard::shard_over(cells.group()));
    auto rest = SplitBackward(*model).backward_input({model->forward(at::ones({2, 8})).sum()},
                                                     {at::Tensor()});
    const auto gathers = parallel.gatherer().num_gathers();
    cells.expect(gathers > 0, "nothing is sharded");
    rest.run();
    cells.expect(parallel.gatherer().num_gathers() == gathers, "a unit was gathered");
  });
}

}  // namespace lockstep::pipeline
