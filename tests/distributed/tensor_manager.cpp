#include "tensor_manager.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <lockstep/nn/tensor_parallel/tensor_parallel.h>

namespace lockstep {

namespace {

using ranks::Cells;

// A module as a user writes it; it is whole until it is wrapped.
struct SharedMlp : torch::nn::Module {
  SharedMlp()
      : up(register_module("up", lockstep::nn::ColumnParallelLinear(6, 8))),
        down(register_module("down", lockstep::nn::RowParallelLinear(8, 2))) {}

  at::Tensor forward(const at::Tensor& x) { return down(up(x).tanh()); }

  lockstep::nn::ColumnParallelLinear up;
  lockstep::nn::RowParallelLinear down;
};

// One layer is not cut, and its name ends like that of one that is; another name has a blank in it.
struct AlikeNames : torch::nn::Module {
  explicit AlikeNames(std::uint64_t seed) {
    torch::manual_seed(seed);
    fc = register_module("fc", lockstep::nn::ColumnParallelLinear(8, 16));
    inner = register_module("x y", torch::nn::Sequential());
    inner->push_back("fc", torch::nn::Linear(8, 8));
  }

  at::Tensor forward(const at::Tensor& x) { return fc(inner->forward(x).tanh()); }

  lockstep::nn::ColumnParallelLinear fc{nullptr};
  torch::nn::Sequential inner{nullptr};
};

void check_alike_names(DistributedManager& dist, Cells& cells) {
  const auto whole = std::make_shared<AlikeNames>(5);
  const auto model = dist.wrap_model(std::make_shared<AlikeNames>(5));
  const auto x = at::arange(24, at::kFloat).view({3, 8}).sin();
  whole->forward(x).square().sum().backward();
  dist.backward(model, model->forward(x).square().sum(), 1);
  std::vector<NamedTensor> parameters;
  for (const auto& item : whole->named_parameters())
    parameters.push_back({item.key(), item.value()});
  const double norm = optim::clip_gradients(parameters, 1e9).norm;
  const double got = dist.clip_gradients(model, 1e9).norm;
  cells.expect(std::abs(got - norm) < 1e-5 * norm,
               fmt::format("the norm is {} and not {}", got, norm));
  const auto state = dist.full_state_dict(model);
  if (!dist.is_main()) return;
  cells.expect(state.size() == parameters.size(), "tensors are missing");
  for (const auto& [name, tensor] : state)
    cells.expect_same(tensor, whole->named_parameters()[name].detach(), name);
}

std::shared_ptr<SharedMlp> seeded_mlp() {
  torch::manual_seed(3);
  return std::make_shared<SharedMlp>();
}

constexpr std::int64_t kBatch = 4;

at::Tensor inputs_of(int data_rank) {
  return at::arange(kBatch * 6, at::kFloat).view({kBatch, 6}).sin() + data_rank;
}

void check_training(DistributedManager& dist, Cells& cells) {
  const auto whole = seeded_mlp();
  const auto plain = optim::make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups({{"up.weight", whole->up->weight},
                                                  {"up.bias", whole->up->bias},
                                                  {"down.weight", whole->down->weight},
                                                  {"down.bias", whole->down->bias}},
                                                 0));
  const auto model = dist.wrap_model(seeded_mlp());
  cells.expect(model->up->weight.size(0) == 4, "the layer was not cut in two");
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
  for (int step = 0; step < 3; ++step) {
    at::Tensor loss = at::zeros({});
    for (int rank = 0; rank < dist.data_size(); ++rank)
      loss = loss + whole->forward(inputs_of(rank)).square().sum();
    (loss / static_cast<double>(kBatch * dist.data_size())).backward();
    dist.backward(model, model->forward(inputs_of(dist.data_rank())).square().sum(), kBatch);
    const double norm = optim::clip_gradients({{"up.weight", whole->up->weight},
                                               {"up.bias", whole->up->bias},
                                               {"down.weight", whole->down->weight},
                                               {"down.bias", whole->down->bias}},
                                              0.1)
                            .norm;
    const double got = dist.clip_gradients(model, 0.1).norm;
    cells.expect(std::abs(got - norm) < 1e-5 * norm,
                 fmt::format("the norm is {} and not {}", got, norm));
    plain->step(0.05);
    plain->zero_grad();
    adamw->step(0.05);
    adamw->zero_grad();
  }
  // The state is gathered on the main rank and loaded again.
  const auto state = dist.full_state_dict(model);
  const auto moments = dist.full_optimizer_state(model, *adamw);
  if (dist.is_main())
    for (const auto& [name, tensor] : state)
      cells.expect_close(tensor, whole->named_parameters()[name].detach(), name);
  const at::Tensor before = model->up->weight.detach().clone();
  {
    const c10::NoGradGuard no_grad;
    model->up->weight.zero_();
  }
  dist.load_full_state_dict(model, state);
  dist.load_full_optimizer_state(model, *adamw, moments);
  cells.expect_same(model->up->weight.detach(), before, "the part that came back");
}

}  // namespace

void check_tensor_manager(DistributedManager dist, Cells& cells) {
  cells.cell("layers that are cut train as whole ones", [&] { check_training(dist, cells); });
  cells.cell("a state that does not fit is refused on every rank", [&] {
    const auto model = dist.wrap_model(seeded_mlp());
    cells.expect_usage_error([&] { dist.load_full_state_dict(model, {}); }, "is missing");
  });
  cells.cell("a model without such layers is refused", [&] {
    cells.expect_usage_error([&] { dist.wrap_model(torch::nn::Linear(4, 4)); },
                             "has no layer that can be cut");
    cells.expect_usage_error([&] { dist.wrap_model(torch::nn::Linear(4, 4)); }, "tensor_plan");
  });
  cells.cell("an optimizer that looks at whole parameters is refused", [&] {
    const auto model = dist.wrap_model(seeded_mlp());
    cells.expect_usage_error([&] { dist.make_optimizer(model, optim::LambOptions{}); },
                             "Lamb looks at whole parameters");
  });
  cells.cell("names that end alike", [&] { check_alike_names(dist, cells); });
  cells.cell("a model that is built by parts is the one that is built as a whole", [&] {
    const auto layer = [] {
      torch::manual_seed(3);
      return lockstep::nn::ColumnParallelLinear(200, 300);
    };
    const auto whole = layer();
    auto built = dist.build_model(layer);
    cells.expect(built->weight.size(0) == 150, "the layer was not cut in two");
    for (const auto& [name, tensor] : dist.full_state_dict(built))
      cells.expect_same(tensor, whole->named_parameters()[name].detach(), name);
  });
}

}  // namespace lockstep
