// Every optimizer that a config can name, on parts of parameters: it does to the bit what it does
// to whole ones, and its state can go from any way of cutting to any other.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/optim/clip.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

// 70 × 70 elements: a matrix's norm is a sum over two blocks, which ranks cut in two again.
constexpr std::int64_t kChainWidth = 70;
constexpr double kRate = 0.02;

std::vector<optim::ParameterGroup> groups_of(const torch::nn::Module& module) {
  return optim::decay_groups(data_parallel::trained_parameters(module), 0.1);
}

// Makes a step of two passes, whose gradients are summed and clipped.
void step(const Cells& cells, Chain& model, optim::Optimizer& optimizer, int number,
          const std::function<data_parallel::NoSync()>& no_sync,
          const std::function<void(double)>& clip) {
  optimizer.zero_grad();
  for (int pass = 0; pass < 2; ++pass) {
    torch::manual_seed(static_cast<std::uint64_t>(1000 * number + 100 * pass + cells.rank()));
    const at::Tensor input = at::randn({3, kChainWidth});
    std::optional<data_parallel::NoSync> guard;
    if (pass == 0) guard.emplace(no_sync());
    model->forward(input).square().mean().backward();
  }
  clip(0.01);
  optimizer.step(kRate);
}

Chain make_chain() {
  torch::manual_seed(11);
  return Chain(3, kChainWidth);
}

// A model in training, cut in one of the ways.
struct Trained {
  virtual ~Trained() = default;
  virtual void step(int number) = 0;
  virtual std::vector<NamedTensor> weights() = 0;
  virtual std::vector<NamedTensor> optimizer_state() = 0;
  virtual void load(const std::vector<NamedTensor>& weights,
                    const std::vector<NamedTensor>& optimizer_state) = 0;
};

void load_weights(Chain& model, const std::vector<NamedTensor>& weights) {
  const c10::NoGradGuard no_grad;
  const auto parameters = model->named_parameters();
  for (const auto& [name, tensor] : weights) at::Tensor(parameters[name]).copy_(tensor);
}

struct Whole final : Trained {
  Whole(Cells& the_cells, const optim::OptimizerOptions& options)
      : cells(the_cells),
        replicas(*model, cells.group()),
        optimizer(optim::make_optimizer(options, groups_of(*model))) {}

  void step(int number) override {
    shard::step(
        cells, model, *optimizer, number, [&] { return replicas.no_sync(); },
        [&](double norm) {
          optim::clip_gradients(data_parallel::trained_parameters(*model), norm);
        });
  }
  std::vector<NamedTensor> weights() override {
    return data_parallel::distinct_tensors(model->named_parameters());
  }
  std::vector<NamedTensor> optimizer_state() override { return optimizer->state(); }
  void load(const std::vector<NamedTensor>& weights,
            const std::vector<NamedTensor>& optimizer_state) override {
    load_weights(model, weights);
    optimizer->load_state(optimizer_state);
  }

  Cells& cells;
  Chain model = make_chain();
  replicate::DistributedDataParallel replicas;
  std::unique_ptr<optim::Optimizer> optimizer;
};

struct Zero1 final : Trained {
  Zero1(Cells& the_cells, const optim::OptimizerOptions& options)
      : cells(the_cells),
        shards(*model, cells.group()),
        replicas(*model, cells.group()),
        optimizer(shards.make_optimizer(options, groups_of(*model))) {}

  void step(int number) override {
    shard::step(
        cells, model, *optimizer, number, [&] { return replicas.no_sync(); },
        [&](double norm) {
          optim::clip_gradients(data_parallel::trained_parameters(*model), norm);
        });
  }
  std::vector<NamedTensor> weights() override {
    return data_parallel::distinct_tensors(model->named_parameters());
  }
  std::vector<NamedTensor> optimizer_state() override {
    return shards.full_optimizer_state(*optimizer, {.rank0_only = false});
  }
  void load(const std::vector<NamedTensor>& weights,
            const std::vector<NamedTensor>& optimizer_state) override {
    load_weights(model, weights);
    shards.load_full_optimizer_state(*optimizer, optimizer_state);
  }

  Cells& cells;
  Chain model = make_chain();
  OptimizerShards shards;
  replicate::DistributedDataParallel replicas;
  std::unique_ptr<optim::Optimizer> optimizer;
};

struct Sharded final : Trained {
  Sharded(Cells& the_cells, const optim::OptimizerOptions& options, Groups groups, Options how)
      : cells(the_cells),
        parallel(*model, std::move(groups), scrubbed(std::move(how))),
        optimizer(parallel.make_optimizer(options, groups_of(*model))) {}

  void step(int number) override {
    shard::step(
        cells, model, *optimizer, number, [&] { return parallel.no_sync(); },
        [&](double norm) { parallel.clip_gradients(norm); });
  }
  std::vector<NamedTensor> weights() override {
    return parallel.full_state_dict({.rank0_only = false});
  }
  std::vector<NamedTensor> optimizer_state() override {
    return parallel.full_optimizer_state(*optimizer, {.rank0_only = false});
  }
  void load(const std::vector<NamedTensor>& weights,
            const std::vector<NamedTensor>& optimizer_state) override {
    parallel.load_full_state_dict(weights);
    parallel.load_full_optimizer_state(*optimizer, optimizer_state);
  }

  Cells& cells;
  Chain model = make_chain();
  FullyShardedDataParallel parallel;
  std::unique_ptr<optim::Optimizer> optimizer;
};

struct Way {
  std::string name;
  std::function<std::unique_ptr<Trained>(Cells&, const optim::OptimizerOptions&)> make;
};

Way sharded_way(const std::string& name, const Options& how) {
  return {name, [how](Cells& cells, const optim::OptimizerOptions& options) {
            return std::make_unique<Sharded>(cells, options, shard_over(cells.group()), how);
          }};
}

std::vector<Way> ways(int num_ranks) {
  std::vector<Way> all = {
      {"ZeRO-1",
       [](Cells& cells, const optim::OptimizerOptions& options) {
         return std::make_unique<Zero1>(cells, options);
       }},
      sharded_way("SHARD_GRAD_OP", {.cut = Cut::gradients}),
      sharded_way("FULL_SHARD", {.max_live_units = 1}),
      sharded_way("FULL_SHARD in one unit", {.units = one_unit()}),
      sharded_way("FULL_SHARD, offloaded",
                  {.cpu_offload = {.offload_optimizer = true, .offload_params = true}}),
  };
  if (num_ranks == 4)
    all.push_back({"HYBRID_SHARD", [](Cells& cells, const optim::OptimizerOptions& options) {
                     const auto& group = cells.group();
                     const auto shard = group->split(group->rank() / 2, group->rank(), "shard");
                     const auto replicas =
                         group->split(group->rank() % 2, group->rank(), "replicas");
                     return std::make_unique<Sharded>(
                         cells, options, shard_over(group, shard, replicas), Options{});
                   }});
  return all;
}

void expect_same(Cells& cells, std::vector<NamedTensor> got, std::vector<NamedTensor> wanted,
                 const std::string& what) {
  std::ranges::sort(got, {}, &NamedTensor::name);
  std::ranges::sort(wanted, {}, &NamedTensor::name);
  cells.expect(got.size() == wanted.size(),
               fmt::format("{}: {} tensors and not {}", what, got.size(), wanted.size()));
  for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i) {
    cells.expect(got[i].name == wanted[i].name, what + ": other names");
    cells.expect_same(got[i].tensor, wanted[i].tensor, what + ": " + wanted[i].name);
  }
}

std::vector<NamedTensor> copy_of(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> copy;
  for (const auto& [name, tensor] : tensors) copy.push_back({name, tensor.detach().clone()});
  return copy;
}

void check_optimizer(Cells& cells, const std::string& name,
                     const optim::OptimizerOptions& options) {
  for (const Way& way : ways(cells.num_ranks()))
    cells.cell(fmt::format("{}, {}", name, way.name), [&] {
      const auto cut = way.make(cells, options);
      Whole whole(cells, options);
      const std::vector<NamedTensor> before = copy_of(whole.weights());
      std::vector<NamedTensor> weights, state;
      for (int number = 0; number < 5; ++number) {
        cut->step(number);
        whole.step(number);
        expect_same(cells, cut->weights(), whole.weights(), fmt::format("step {}", number));
        if (number == 2) {
          weights = copy_of(cut->weights());
          state = copy_of(cut->optimizer_state());
        }
      }
      expect_same(cells, cut->optimizer_state(), whole.optimizer_state(), "the optimizer's state");
      for (std::size_t i = 0; i < before.size(); ++i)
        cells.expect(!at::equal(before[i].tensor, whole.weights()[i].tensor),
                     before[i].name + " did not move");
      // Another way of cutting goes on from this state.
      for (const Way& other : ways(cells.num_ranks())) {
        if (other.name == way.name) continue;
        const auto next = other.make(cells, options);
        next->step(7);
        next->load(weights, state);
        for (int number = 3; number < 5; ++number) next->step(number);
        expect_same(cells, next->weights(), whole.weights(), "going on as " + other.name);
      }
    });
}

}  // namespace

void check_every_optimizer(Cells& cells) {
  for (const optim::OptimizerType& type : optim::optimizer_types())
    check_optimizer(cells, type.names.front(), type.options);
  check_optimizer(cells, "SGD with momentum", optim::SGDOptions{.momentum = 0.9, .nesterov = true});
  // One bound is reached, the other is not.
  check_optimizer(cells, "Lamb, stretched little", optim::LambOptions{.max_coeff = 0.5});
  check_optimizer(cells, "Lamb, stretched much",
                  optim::LambOptions{.bias_correction = false, .max_coeff = 1e6, .min_coeff = 0});
  check_optimizer(cells, "Muon, by the root mean square",
                  optim::MuonOptions{.nesterov = false,
                                     .ns_steps = 2,
                                     .adjust_lr_fn = optim::MuonRate::match_rms_adamw,
                                     .muon_lr = 2e-3,
                                     .lr = 1e-3});
}

}  // namespace lockstep::shard
