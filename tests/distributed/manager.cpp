#include "manager.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

// Backward of a loss whose gradient is rank + 1 for each weight.
void backward(Cells& cells, nn::Linear& model) {
  (model->weight.sum() * (cells.rank() + 1)).backward();
}

// The mean of rank + 1 over the ranks.
at::Tensor mean_gradient(const Cells& cells) {
  return at::full({2, 2}, (cells.num_ranks() + 1) / 2.0f);
}

// A module that must not be moved.
struct KeepsThis : nn::Module {
  explicit KeepsThis(std::int64_t width = 2)
      : layer(register_module("layer", nn::Linear(width, width))),
        run([this](const at::Tensor& x) { return layer(x); }),
        made_at(this) {}

  at::Tensor forward(const at::Tensor& x) { return run(x); }

  nn::Linear layer;
  std::function<at::Tensor(const at::Tensor&)> run;
  const KeepsThis* made_at;
};

struct CountingHook : torch::autograd::FunctionPostHook {
  explicit CountingHook(int& count) : count(count) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    ++count;
    return outputs;
  }
  int& count;
};

void check_making(DistributedManager& dist, Cells& cells) {
  cells.cell("a model that is made where it stays", [&] {
    const auto expect_whole = [&](const std::shared_ptr<KeepsThis>& model, std::int64_t width,
                                  const char* how) {
      cells.expect(model->made_at == model.get(), fmt::format("{}: it was moved", how));
      cells.expect(dist.is_wrapped(model), fmt::format("{}: it is not wrapped", how));
      model->forward(at::ones({1, width})).sum().backward();
      cells.expect(model->layer->weight.grad().defined(), fmt::format("{}: no gradient", how));
    };
    expect_whole(dist.wrap_model<KeepsThis>(), 2, "without arguments");
    expect_whole(dist.wrap_model<KeepsThis>(3), 3, "with an argument");
    expect_whole(dist.wrap_model([] { return KeepsThis(4); }), 4, "by a function");
    expect_whole(dist.wrap_model([] { return std::make_shared<KeepsThis>(); }), 2, "by a pointer");
    expect_whole(dist.build_model([] { return KeepsThis(5); }), 5, "by build_model()");
    const nn::Linear holder = dist.wrap_model<nn::Linear>(3, 2);
    cells.expect(dist.is_wrapped(holder) && holder->weight.size(0) == 2, "a holder");
  });
}

void check_wrapping(DistributedManager& dist, Cells& cells) {
  cells.cell("a model is wrapped once", [&] {
    const nn::Linear model(2, 2);
    cells.expect(!dist.is_wrapped(model), "it is wrapped already");
    cells.expect_usage_error([&] { dist.backward(model, at::zeros({}), 1); },
                             "pass what wrap_model() returned");
    dist.wrap_model(model);
    cells.expect(dist.is_wrapped(model), "it is not wrapped");
    cells.expect_usage_error([&] { dist.wrap_model(model); },
                             "is wrapped already: call wrap_model() once for a model");
    cells.expect(!dist.is_wrapped(nn::Linear(2, 2)), "another model is wrapped");
    cells.expect_usage_error([&] { dist.convert_sync_batchnorm(model); },
                             "call convert_sync_batchnorm() before wrap_model()");
  });
  cells.cell("no model", [&] {
    const nn::Linear none = nullptr;
    cells.expect_usage_error([&] { dist.wrap_model(none); }, "wrap_model() got no model");
    cells.expect_usage_error([&] { dist.convert_sync_batchnorm(none); },
                             "convert_sync_batchnorm() got no model");
    cells.expect_usage_error([&] { dist.backward(none, at::zeros({}), 1); }, "there is no model");
    cells.expect(!dist.is_wrapped(none) && !dist.synchronises_batch_norms(none), "nothing is");
  });
  cells.cell("a model without tensors", [&] {
    cells.expect_usage_error([&] { dist.wrap_model(nn::Sequential()); },
                             fmt::format("no parameters and no buffers on {0} of {0} ranks: there "
                                         "is nothing to train",
                                         cells.num_ranks()));
    if (cells.num_ranks() == 1) return;
    nn::Sequential model;
    if (cells.rank() == 0) model->push_back(nn::Linear(2, 2));
    cells.expect_usage_error([&] { dist.wrap_model(model); }, "on 1 of 2 ranks");
  });
  cells.cell("a model with hooks of one's own", [&] {
    nn::Linear model(2, 2);
    const auto accumulator = torch::autograd::impl::grad_accumulator(model->weight);
    int heard = 0;
    accumulator->add_post_hook(std::make_unique<CountingHook>(heard));
    dist.wrap_model(model);
    backward(cells, model);
    cells.expect_same(model->weight.grad(), mean_gradient(cells), "the gradient");
    cells.expect(heard == 1, "the user's own hook was not called once");
  });
  cells.cell("two models", [&] {
    nn::Linear first = dist.wrap_model(nn::Linear(2, 2));
    nn::Linear second = dist.wrap_model(nn::Linear(2, 2));
    for (int step = 0; step < 2; ++step) {
      first->zero_grad();
      second->zero_grad();
      backward(cells, first);
      {
        const auto guard = dist.no_sync(second);
        backward(cells, second);
      }
      cells.expect_same(first->weight.grad(), mean_gradient(cells), "the first's gradient");
      cells.expect_same(second->weight.grad(), at::full({2, 2}, cells.rank() + 1.0f),
                        "the second's gradient before it is exchanged");
      backward(cells, second);
      cells.expect_same(second->weight.grad(), 2 * mean_gradient(cells), "the second's gradient");
    }
    second->zero_grad();
    dist.backward(second, second->bias.sum(), 3);
    cells.expect(dist.totals(second).count() == 3 * cells.num_ranks(), "the count is wrong");
  });
  cells.cell("a model that is gone before its manager", [&] {
    at::Tensor weight;
    std::weak_ptr<nn::Module> seen;
    std::unique_ptr<optim::Optimizer> optimizer;
    {
      nn::Linear model = dist.wrap_model(nn::Linear(2, 2));
      optimizer = dist.make_optimizer(model, optim::SGDOptions{});
      backward(cells, model);
      weight = model->weight;
      seen = model.ptr();
    }
    cells.expect(seen.expired(), "the manager keeps the model alive");
    // Asking about another model makes the manager let go of the first, whose gradients no rank
    // sums any more.
    nn::Linear next(2, 2);
    cells.expect(!dist.is_wrapped(next), "a new model at the same place is taken for it");
    cells.expect_usage_error([&] { optimizer->step(0.1); }, "the model of this optimizer is gone");
    cells.expect_usage_error([&] { optimizer->zero_grad(); },
                             "the model of this optimizer is gone");
    weight.mutable_grad() = at::Tensor();
    const auto use = [&] { (weight.sum() * (cells.rank() + 1)).backward(); };
    if (cells.num_ranks() > 1)
      cells.expect_usage_error(use, "was spread over the ranks and is gone");
    else
      use();
    dist.wrap_model(next);
    backward(cells, next);
    cells.expect_same(next->weight.grad(), mean_gradient(cells), "the next model's gradient");
  });
}

void check_optimizers_that_stay(Cells& cells) {
  for (const auto strategy : {ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER,
                              ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD})
    cells.cell(fmt::format("an optimizer that outlives its manager, strategy {}",
                           static_cast<int>(strategy)),
               [&] {
                 std::unique_ptr<optim::Optimizer> optimizer;
                 {
                   auto dist = setup_distributed({.mode = ParallelMode::FSDP,
                                                  .sharding_strategy = strategy,
                                                  .device_type = c10::DeviceType::CPU});
                   auto model = dist.wrap_model<nn::Linear>(2, 2);
                   optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
                   backward(cells, model);
                   optimizer->step(0.1);
                 }
                 const char* const said = "the model of this optimizer is gone";
                 cells.expect_usage_error([&] { optimizer->zero_grad(); }, said);
                 cells.expect_usage_error([&] { optimizer->step(0.1); }, said);
                 cells.expect_usage_error([&] { (void)optimizer->state(); }, said);
               });
}

void check_batch_norms(DistributedManager& dist, Cells& cells) {
  cells.cell("synchronised batch norms are a model's", [&] {
    nn::BatchNorm1d norm(2);
    nn::Sequential model(nn::Linear(2, 2), norm);
    nn::Sequential other(nn::Linear(2, 2), nn::BatchNorm1d(2));
    cells.expect(!dist.synchronises_batch_norms(model), "before they are converted");
    cells.expect(dist.convert_sync_batchnorm(model) == 1, "there is one");
    cells.expect(dist.synchronises_batch_norms(model), "of a converted model");
    cells.expect(dist.synchronises_batch_norms(norm), "of a converted batch norm");
    cells.expect(!dist.synchronises_batch_norms(other), "of another model");
    cells.expect(dist.convert_sync_batchnorm(nn::Linear(2, 2)) == 0, "of one that has none");
    // The wrapped model is inside a larger one.
    const auto larger = std::make_shared<nn::Module>("larger");
    larger->register_module("model", model);
    larger->register_module("other", other);
    cells.expect(dist.synchronises_batch_norms(larger), "of a model with a converted part");
    dist.wrap_model(larger);
    const at::Tensor input = at::full({1, 2}, static_cast<float>(cells.rank()));
    if (cells.num_ranks() == 1) return;
    model->forward(input);
    cells.expect(norm->num_batches_tracked.item<std::int64_t>() == 1, "no batch was counted");
  });
  cells.cell("batch norms of a model that is converted to another dtype afterwards", [&] {
    nn::BatchNorm1d norm(nn::BatchNorm1dOptions(2).momentum(1.0));
    nn::Sequential model(nn::Linear(2, 2), norm);
    dist.convert_sync_batchnorm(model);
    model->to(at::kDouble);
    dist.wrap_model(model);
    norm->forward(at::full({2, 2}, static_cast<double>(cells.rank()), at::kDouble));
    const double mean = (cells.num_ranks() - 1) / 2.0;
    cells.expect_same(norm->running_mean, at::full({2}, mean, at::kDouble), "the running mean");
  });
  cells.cell("converted batch norms that are gone", [&] {
    std::weak_ptr<nn::Module> seen;
    {
      nn::BatchNorm1d norm(2);
      dist.convert_sync_batchnorm(norm);
      seen = norm.ptr();
    }
    cells.expect(seen.expired(), "the manager keeps them alive");
    nn::BatchNorm1d next(2);
    cells.expect(!dist.is_wrapped(next) && !dist.synchronises_batch_norms(next),
                 "a new one at the same place is taken for them");
  });
}

void check_numbers(const DistributedManager& dist, Cells& cells) {
  cells.cell("sums and means of numbers", [&] {
    const double tiny = 1e-12;  // lost in float32
    const std::vector<double> sums = dist.sum({1 + tiny, static_cast<double>(cells.rank())});
    const double ranks = cells.num_ranks();
    cells.expect(sums[0] == ranks * (1 + tiny) && sums[1] == ranks * (ranks - 1) / 2,
                 fmt::format("the sums are {} and {}", sums[0], sums[1]));
    cells.expect(dist.mean(cells.rank()) == (ranks - 1) / 2, "the mean is wrong");
    cells.expect(dist.sum(std::vector<double>()).empty(), "a sum of nothing is something");
  });
  cells.cell("the main rank's text", [&] {
    const std::string text(1000, 'x');
    cells.expect(dist.broadcast(dist.is_main() ? text : "mine") == text, "the text is wrong");
    cells.expect(dist.broadcast(dist.is_main() ? "" : "mine").empty(), "no text is some");
  });
}

}  // namespace

void check_manager(DistributedManager dist, Cells& cells) {
  check_making(dist, cells);
  check_wrapping(dist, cells);
  check_batch_norms(dist, cells);
  check_optimizers_that_stay(cells);
  check_numbers(dist, cells);
}

}  // namespace lockstep
