#include "stages_manager.h"

#include <cmath>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/utils.h>

#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/split_model.h>

namespace lockstep {

namespace {

using Tensors = std::vector<at::Tensor>;

// A table that is both embedding and head, layers in a vector, and a parameter of the model's own.
struct WordsImpl : torch::nn::Module {
  WordsImpl() {
    for (int i = 0; i < 4; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
  }
  torch::nn::Embedding table = register_module("table", torch::nn::Embedding(5, 6));
  at::Tensor scale = register_parameter("scale", at::full({6}, 1.5));
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Words);

constexpr int kMicroBatches = 3;

Words words() {
  torch::manual_seed(7);
  return Words();
}

at::Tensor samples_of(int micro_batch) { return at::remainder(at::arange(4) + micro_batch, 5); }

pipeline::ListedModel listed(Words model) {
  pipeline::ListedModel all;
  all.model = model.ptr();
  all.blocks = pipeline::blocks_of(model->layers);
  all.blocks.insert(all.blocks.begin(),
                    {{model->table.ptr()}, [=](const Tensors& x) mutable -> Tensors {
                       return {model->table->forward(x[0])};
                     }});
  all.blocks.push_back({{model->table.ptr()}, [=](const Tensors& x) mutable -> Tensors {
                          return {(x[0] * model->scale).matmul(model->table->weight.t())};
                        }});
  all.input = [](int micro_batch) -> Tensors { return {samples_of(micro_batch)}; };
  all.loss = [](int micro_batch, const Tensors& x) {
    return at::cross_entropy_loss(x[0], samples_of(micro_batch + 1), {}, at::Reduction::Sum);
  };
  return all;
}

// The result of a clipped step in one process: the norm, and every parameter.
double whole_step(Words model, double max_norm, double rate) {
  const pipeline::ListedModel all = listed(model);
  for (int i = 0; i < kMicroBatches; ++i) {
    Tensors x = all.input(i);
    for (const auto& block : all.blocks) x = block.forward(x);
    (all.loss(i, x) / (4 * kMicroBatches)).backward();
  }
  const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), max_norm);
  const torch::NoGradGuard no_grad;
  for (at::Tensor parameter : model->parameters()) parameter.sub_(rate * parameter.grad());
  return norm;
}

// The model's parts count as one model for the norm and for saved state, under the names of the
// whole model.
void check_listed_model(DistributedManager dist, ranks::Cells& cells) {
  const auto group = dist.mesh().axis("pp");
  const auto schedule =
      pipeline::make_schedule(pipeline::ScheduleKind::one_forward_one_backward,
                              {.num_ranks = group->size(), .num_micro_batches = kMicroBatches});
  Words whole = words(), model = words();
  const auto stages = pipeline::split_model(listed(model), schedule.rank_of_stage, *group);
  dist.wrap_model(model);
  const auto optimizer = dist.make_optimizer(model, optim::SGDOptions{});
  pipeline::Pipeline pipe(schedule, stages.mine, group, {.tied = stages.tied});
  for (int step = 0; step < 2; ++step) {
    whole->zero_grad();
    const double wanted = whole_step(whole, 0.1, 0.5);
    optimizer->zero_grad();
    dist.backward_passes(
        model, [&] { return at::scalar_tensor(pipe.run_step(), at::kDouble); }, 4 * kMicroBatches);
    const double norm = dist.clip_gradients(model, 0.1).norm;
    cells.expect(std::abs(norm / wanted - 1) < 1e-5, fmt::format("norm {} not {}", norm, wanted));
    optimizer->step(0.5);
  }
  const auto state = dist.full_state_dict(model);
  if (!dist.is_main()) return;
  const auto all = whole->named_parameters();
  cells.expect(state.size() == all.size(), fmt::format("{} tensors are saved", state.size()));
  for (const NamedTensor& one : state) {
    const at::Tensor* right = all.find(one.name);
    cells.expect(right != nullptr, one.name + " is no name of the whole");
    if (right != nullptr) cells.expect_close(one.tensor, *right, one.name);
  }
}

}  // namespace

void check_stages_manager(DistributedManager dist, ranks::Cells& cells) {
  using torch::nn::Linear;
  using torch::nn::Sequential;
  cells.cell("a whole model on each rank of a pipeline", [&] {
    cells.expect_usage_error(
        [&] { dist.wrap_model(Sequential(Linear(3, 3), Linear(3, 3))); },
        "all 2 ranks of the pipeline wrap the same parameters ('0.weight' and so on)");
  });
  cells.cell("a name that two stages have for different layers", [&] {
    Sequential mine;
    torch::manual_seed(static_cast<std::uint64_t>(dist.rank()));
    mine->push_back("fc", Linear(3, 3));
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    cells.expect_usage_error([&] { dist.wrap_model(mine); },
                             "both have a parameter 'fc.weight', with different values");
  });
  cells.cell("a layer that two stages share", [&] {
    Sequential mine;
    torch::manual_seed(1);
    mine->push_back("fc", Linear(3, 3));
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    dist.wrap_model(mine);
    const auto state = dist.full_state_dict(mine);
    cells.expect(!dist.is_main() || state.size() == 6, "not each parameter once");
  });
  cells.cell("a model that lists its blocks", [&] { check_listed_model(dist, cells); });
  cells.cell("its stages", [&] {
    Sequential mine;
    mine->push_back(dist.rank() == 0 ? "first" : "second", Linear(3, 3));
    dist.wrap_model(mine);
    cells.expect(dist.is_wrapped(mine), "not wrapped");
  });
}

}  // namespace lockstep
