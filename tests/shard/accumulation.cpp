#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

at::Tensor pass_input(int step, int pass, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + 10 * pass + rank));
  return at::randn({2, 5});
}

at::Tensor pass_loss(Chain& model, const at::Tensor& input) {
  return model->forward(input).pow(2).mean();
}

// Runs all ranks' passes in one process.
void reference_pass(Chain& model, int step, int pass, int num_ranks) {
  for (int rank = 0; rank < num_ranks; ++rank)
    (pass_loss(model, pass_input(step, pass, rank)) / num_ranks).backward();
}

void expect_gradients(Cells& cells, FullyShardedDataParallel& parallel, const Chain& alone,
                      const std::string& when) {
  for (const auto& item : alone->named_parameters())
    cells.expect_close(parallel.full_gradient(item.key()), item.value().grad(),
                       fmt::format("{}: the gradient of {}", when, item.key()));
}

using Zero = std::function<void(Chain& model, optim::Optimizer& optimizer)>;

const std::vector<std::pair<std::string, Zero>>& ways_to_zero() {
  static const std::vector<std::pair<std::string, Zero>> all = {
      {"the optimizer's zero_grad()", [](Chain&, optim::Optimizer& it) { it.zero_grad(); }},
      {"the module's zero_grad()", [](Chain& model, optim::Optimizer&) { model->zero_grad(); }},
      {"zero_grad(set_to_none)",
       [](Chain& model, optim::Optimizer&) { model->zero_grad(/*set_to_none=*/true); }},
      {"zero_grad(not set_to_none)",
       [](Chain& model, optim::Optimizer&) { model->zero_grad(/*set_to_none=*/false); }},
      {"mutable_grad().reset()",
       [](Chain& model, optim::Optimizer&) {
         for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
       }},
      {"grad().zero_()",
       [](Chain& model, optim::Optimizer&) {
         for (at::Tensor& parameter : model->parameters())
           if (parameter.grad().defined()) parameter.grad().zero_();
       }},
      {"grad().detach().zero_()",
       [](Chain& model, optim::Optimizer&) {
         for (at::Tensor& parameter : model->parameters())
           if (parameter.grad().defined()) parameter.grad().detach().zero_();
       }},
  };
  return all;
}

// Runs steps of three passes; those in `quiet` are under no_sync().
void run_steps(Cells& cells, Cut cut, const std::vector<bool>& quiet, const Zero& zero) {
  torch::manual_seed(4);
  Chain alone(3);
  torch::manual_seed(4);
  Chain model(3);
  FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
  const auto optimizer = adamw(parallel, *model);
  const auto reference = optim::make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*alone), 0.1));
  for (int step = 0; step < 3; ++step) {
    zero(model, *optimizer);
    zero(alone, *reference);
    for (int pass = 0; pass < 3; ++pass) {
      std::optional<data_parallel::NoSync> guard;
      if (quiet[static_cast<std::size_t>(pass)]) guard.emplace(parallel.no_sync());
      pass_loss(model, pass_input(step, pass, cells.rank())).backward();
      reference_pass(alone, step, pass, cells.num_ranks());
      if (!guard)
        expect_gradients(cells, parallel, alone, fmt::format("step {}, pass {}", step, pass));
    }
    const auto clipped = parallel.clip_gradients(0.05);
    const auto wanted = optim::clip_gradients(data_parallel::trained_parameters(*alone), 0.05);
    cells.expect(std::abs(clipped.norm - wanted.norm) < 1e-5 * wanted.norm,
                 fmt::format("the norm is {}, not {}", clipped.norm, wanted.norm));
    optimizer->step(0.01);
    reference->step(0.01);
  }
  const auto expected = alone->named_parameters();
  for (const auto& [name, tensor] : parallel.full_state_dict({.rank0_only = false}))
    cells.expect_close(tensor, expected[name], name);
}

constexpr int kPasses = 3;
constexpr int kSteps = 2;

// Ranks have different numbers of samples, and in some passes none.
std::int64_t samples_of(int step, int pass, int rank) { return (rank + step + 2 * pass) % 3 * 2; }

// A sum over samples. In each pass but the second a layer has no gradient.
at::Tensor counted_loss(Chain& model, int step, int pass, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + 10 * pass + rank));
  const std::int64_t samples = samples_of(step, pass, rank);
  at::Tensor hidden = at::randn({std::max<std::int64_t>(samples, 1), 5});
  for (int layer = 0; layer < 3; ++layer)
    if (pass == 1 || layer != pass) hidden = at::tanh(model->layer(layer).forward(hidden));
  return hidden.pow(2).sum() * (samples > 0 ? 1 : 0);
}

using Tensors = std::vector<NamedTensor>;

// All gradients of all steps, and the weights after them.
Tensors run_counted_steps(Cells& cells, data_parallel::ParallelModel& parallel, Chain& model) {
  const auto optimizer = parallel.make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
  Tensors all;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    double count = 0;
    for (int pass = 0; pass < kPasses; ++pass) {
      std::optional<data_parallel::Accumulation> more;
      if (pass + 1 < kPasses) more.emplace(parallel.accumulate());
      parallel.backward(counted_loss(model, step, pass, cells.rank()),
                        samples_of(step, pass, cells.rank()));
      for (int rank = 0; rank < cells.num_ranks(); ++rank)
        count += static_cast<double>(samples_of(step, pass, rank));
    }
    cells.expect(parallel.totals().count() == count, "the count is wrong");
    for (const NamedTensor& one : data_parallel::trained_parameters(*model))
      all.push_back({fmt::format("step {}: the gradient of {}", step, one.name),
                     parallel.full_gradient(one.name).clone()});
    parallel.clip_gradients(0.05);
    optimizer->step(0.01);
  }
  for (const NamedTensor& one : parallel.full_state_dict({.rank0_only = false})) all.push_back(one);
  return all;
}

Tensors counted_steps_alone(int num_ranks) {
  torch::manual_seed(4);
  Chain model(3);
  const auto optimizer = optim::make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
  Tensors all;
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    double count = 0;
    for (int rank = 0; rank < num_ranks; ++rank)
      for (int pass = 0; pass < kPasses; ++pass)
        count += static_cast<double>(samples_of(step, pass, rank));
    for (int rank = 0; rank < num_ranks; ++rank)
      for (int pass = 0; pass < kPasses; ++pass)
        (counted_loss(model, step, pass, rank) / count).backward();
    const Tensors trained = data_parallel::trained_parameters(*model);
    for (const NamedTensor& one : trained) all.push_back({one.name, one.tensor.grad().clone()});
    optim::clip_gradients(trained, 0.05);
    optimizer->step(0.01);
  }
  for (const NamedTensor& one : data_parallel::trained_parameters(*model)) all.push_back(one);
  return all;
}

// Every kind of data parallelism, which all add in the order that `each_pass` says.
void check_order_of_passes(Cells& cells) {
  const auto& all = cells.group();
  using Make =
      std::function<std::unique_ptr<data_parallel::ParallelModel>(torch::nn::Module & module)>;
  const auto sharded_with = [&](Options options) -> Make {
    return [&all, options = scrubbed(std::move(options))](torch::nn::Module& module) {
      return std::make_unique<FullyShardedDataParallel>(module, shard_over(all), options);
    };
  };
  const std::vector<std::pair<std::string, Make>> kinds = {
      {"DDP",
       [&](torch::nn::Module& module) {
         return std::make_unique<replicate::DistributedDataParallel>(module, all);
       }},
      {"DDP, gradients sent from where they are",
       [&](torch::nn::Module& module) {
         return std::make_unique<replicate::DistributedDataParallel>(
             module, all, replicate::Options{.buckets = {.first_bytes = 1, .bytes = 1}});
       }},
      {"ZeRO-1",
       [&](torch::nn::Module& module) {
         return std::make_unique<replicate::DistributedDataParallel>(
             module, all, replicate::Options(), data_parallel::ModelContext(),
             std::make_unique<OptimizerShards>(module, all));
       }},
      {"SHARD_GRAD_OP", sharded_with({.cut = Cut::gradients})},
      {"FULL_SHARD", sharded_with({})},
      {"HYBRID_SHARD, a copy on each rank", [&](torch::nn::Module& module) {
         return std::make_unique<FullyShardedDataParallel>(
             module, shard_over(all, all->split(all->rank(), 0, "copy"), all), scrubbed());
       }}};
  const Tensors alone = counted_steps_alone(cells.num_ranks());
  Tensors of_way[2];
  for (const bool each_pass : {false, true})
    for (const auto& [name, make] : kinds)
      cells.cell(fmt::format("{}, counted passes exchanged {}", name,
                             each_pass ? "as they come" : "at the end"),
                 [&] {
                   torch::manual_seed(4);
                   Chain model(3);
                   const auto parallel = make(*model);
                   parallel->exchange_each_pass(each_pass);
                   const Tensors got = run_counted_steps(cells, *parallel, model);
                   Tensors& wanted = of_way[each_pass ? 1 : 0];
                   if (wanted.empty()) wanted = got;
                   for (std::size_t i = 0; i < got.size(); ++i) {
                     cells.expect_same(got[i].tensor, wanted[i].tensor, got[i].name);
                     cells.expect_close(got[i].tensor, alone[i].tensor, got[i].name);
                   }
                 });
  cells.cell("the two orders of addition round differently", [&] {
    bool differ = false;
    for (std::size_t i = 0; i < of_way[0].size(); ++i)
      differ = differ || !at::equal(of_way[0][i].tensor, of_way[1][i].tensor);
    cells.expect(differ, "both ways have the same bits, so one was never taken");
  });
  for (const auto& [name, make] : kinds)
    cells.cell(name + ", a step between passes that are exchanged as they come", [&] {
      torch::manual_seed(4);
      Chain model(3);
      const auto parallel = make(*model);
      parallel->exchange_each_pass(true);
      const auto optimizer = parallel->make_optimizer(
          optim::AdamWOptions{},
          optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
      {
        const auto more = parallel->accumulate();
        parallel->backward(counted_loss(model, 0, 1, cells.rank()), 2);
      }
      cells.expect_usage_error([&] { optimizer->step(0.1); }, "accumulate()");
      parallel->backward(counted_loss(model, 0, 1, cells.rank()), 2);
      optimizer->step(0.1);
      cells.expect(parallel->totals().count() == 4.0 * cells.num_ranks(), "the count is wrong");
    });
  for (const bool each_pass : {false, true})
    for (const auto& [name, make] : kinds)
      cells.cell(fmt::format("{}, passes are given up, exchanged {}", name,
                             each_pass ? "as they come" : "at the end"),
                 [&] {
                   torch::manual_seed(4);
                   Chain model(3);
                   const auto parallel = make(*model);
                   parallel->exchange_each_pass(each_pass);
                   const auto optimizer = parallel->make_optimizer(
                       optim::AdamWOptions{},
                       optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
                   {
                     const auto more = parallel->accumulate();
                     parallel->backward(counted_loss(model, 0, 1, cells.rank()), 2);
                     const auto local = parallel->no_sync();
                     parallel->backward(counted_loss(model, 2, 1, cells.rank()), 2);
                   }
                   optimizer->zero_grad();
                   parallel->backward(counted_loss(model, 1, 1, cells.rank()), 2);
                   cells.expect(parallel->totals().count() == 2.0 * cells.num_ranks(),
                                "the count is wrong");
                   torch::manual_seed(4);
                   Chain twin(3);
                   const auto fresh = make(*twin);
                   fresh->backward(counted_loss(twin, 1, 1, cells.rank()), 2);
                   for (const NamedTensor& one : data_parallel::trained_parameters(*twin))
                     cells.expect_same(parallel->full_gradient(one.name),
                                       fresh->full_gradient(one.name), one.name);
                 });
  cells.cell("a pass under no_sync() among passes that are exchanged as they come", [&] {
    for (const auto& [name, make] : kinds) {
      torch::manual_seed(4);
      Chain model(3);
      const auto parallel = make(*model);
      parallel->exchange_each_pass(true);
      for (int pass = 0; pass < 4; ++pass) {
        std::optional<data_parallel::Accumulation> more;
        std::optional<data_parallel::NoSync> local;
        if (pass < 3) more.emplace(parallel->accumulate());
        if (pass == 1) local.emplace(parallel->no_sync());
        // A layer is first used in the pass that is this rank's alone.
        parallel->backward(counted_loss(model, 0, pass, cells.rank()), 2);
      }
      torch::manual_seed(4);
      Chain one(3);
      for (int pass = 0; pass < 4; ++pass)
        for (int rank = 0; rank < cells.num_ranks(); ++rank)
          (counted_loss(one, 0, pass, rank) / (8.0 * cells.num_ranks())).backward();
      for (const NamedTensor& wanted : data_parallel::trained_parameters(*one))
        cells.expect_close(parallel->full_gradient(wanted.name), wanted.tensor.grad(),
                           name + ", " + wanted.name);
    }
  });
}

}  // namespace

void check_accumulation(Cells& cells) {
  check_order_of_passes(cells);
  for (const Cut cut : {Cut::gradients, Cut::gradients_and_parameters}) {
    const std::string kind = cut == Cut::gradients ? "SHARD_GRAD_OP" : "FULL_SHARD";
    for (const auto& [name, zero] : ways_to_zero())
      cells.cell(fmt::format("{}, exchange in every pass, {}", kind, name), [&] {
        run_steps(cells, cut, {false, false, false}, zero);
      });
    for (const auto& [name, quiet] :
         std::vector<std::pair<std::string, std::vector<bool>>>{{"first", {true, false, false}},
                                                                {"middle", {false, true, false}},
                                                                {"first two", {true, true, false}}})
      for (const std::size_t way : {0u, 3u, 5u})
        cells.cell(fmt::format("{}, no_sync in the {}, {}", kind, name, ways_to_zero()[way].first),
                   [&] { run_steps(cells, cut, quiet, ways_to_zero()[way].second); });
    cells.cell(kind + ", some gradients zeroed and others not", [&] {
      torch::manual_seed(4);
      Chain alone(3);
      torch::manual_seed(4);
      Chain model(3);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      for (int pass = 0; pass < 4; ++pass) {
        for (Chain* const net : {&model, &alone}) {
          if (pass == 1) (*net)->layer(0).weight.mutable_grad().reset();
          if (pass == 2) (*net)->layer(1).bias.grad().zero_();
          if (pass == 3) (*net)->layers[2]->zero_grad();
        }
        pass_loss(model, pass_input(0, pass, cells.rank())).backward();
        reference_pass(alone, 0, pass, cells.num_ranks());
        expect_gradients(cells, parallel, alone, fmt::format("pass {}", pass));
      }
    });
    cells.cell(kind + ", zeroed after what no_sync left", [&] {
      torch::manual_seed(4);
      Chain alone(3);
      torch::manual_seed(4);
      Chain model(3);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      {
        const auto guard = parallel.no_sync();
        pass_loss(model, pass_input(0, 0, cells.rank())).backward();
      }
      // This pass is given up, as when a loss is not finite.
      model->zero_grad();
      pass_loss(model, pass_input(0, 1, cells.rank())).backward();
      reference_pass(alone, 0, 1, cells.num_ranks());
      expect_gradients(cells, parallel, alone, "after a pass that was given up");
    });
    cells.cell(kind + ", a step without gradients changes nothing", [&] {
      Chain model(2);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      const auto optimizer = adamw(parallel, *model);
      pass_loss(model, pass_input(0, 0, cells.rank())).backward();
      optimizer->step(0.1);
      const auto before = parallel.full_state_dict({.rank0_only = false});
      optimizer->zero_grad();
      optimizer->step(0.1);
      const auto after = parallel.full_state_dict({.rank0_only = false});
      for (std::size_t index = 0; index < before.size(); ++index)
        cells.expect_same(after[index].tensor, before[index].tensor, before[index].name);
    });
    cells.cell(kind + ", counted passes of several sizes", [&] {
      torch::manual_seed(4);
      Chain alone(3);
      torch::manual_seed(4);
      Chain model(3);
      FullyShardedDataParallel parallel = sharded(cells, *model, {.cut = cut});
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        alone->zero_grad();
        const auto sum_of = [&](Chain& net, int pass, int rank) {
          // The last rank has no samples of its own.
          const double weight = rank + 1 == cells.num_ranks() ? 0 : 1;
          return net->forward(pass_input(step, pass, rank)).pow(2).sum() * weight;
        };
        const auto count_of = [&](int rank) { return rank + 1 == cells.num_ranks() ? 0 : 2; };
        {
          const auto guard = parallel.no_sync();
          parallel.backward(sum_of(model, 0, cells.rank()), count_of(cells.rank()));
        }
        parallel.backward(sum_of(model, 1, cells.rank()), count_of(cells.rank()));
        const double count = 4.0 * (cells.num_ranks() - 1);
        for (int rank = 0; rank < cells.num_ranks(); ++rank)
          for (int pass = 0; pass < 2; ++pass) (sum_of(alone, pass, rank) / count).backward();
        cells.expect(parallel.totals().count() == count, "the count is wrong");
        expect_gradients(cells, parallel, alone, fmt::format("step {}", step));
      }
    });
  }
}

}  // namespace lockstep::shard
