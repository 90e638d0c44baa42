#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/parallel/shard/optimizer_shards.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

namespace nn = torch::nn;
using ranks::Cells;

// Has parameters of two dtypes, tied and frozen ones, and buffers.
struct ManyImpl : nn::Module {
  nn::Linear first{5, 5}, second{5, 5}, frozen{5, 3};
  nn::BatchNorm1d norm{5};
  at::Tensor scale;
  ManyImpl() {
    register_module("blocks", nn::Sequential(first, second));
    register_module("norm", norm);
    register_module("tied", first);
    register_module("frozen", frozen);
    for (at::Tensor& parameter : frozen->parameters()) parameter.requires_grad_(false);
    scale = register_parameter("scale", at::randn({7}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor hidden = norm(second(at::tanh(first(input))));
    return frozen(first(hidden)).pow(2).mean() + scale.pow(2).sum();
  }
};
TORCH_MODULE(Many);

struct Training {
  Many model;
  FullyShardedDataParallel parallel;
  std::unique_ptr<optim::Optimizer> optimizer;

  Training(const Cells& cells, std::uint64_t seed, Options options)
      : model(seeded(seed)),
        parallel(*model, shard_over(cells.group()), scrubbed(std::move(options))),
        optimizer(adamw(parallel, *model)) {}

  static Many seeded(std::uint64_t seed) {
    torch::manual_seed(seed);
    return Many();
  }

  void step(int number) {
    torch::manual_seed(static_cast<std::uint64_t>(number));
    optimizer->zero_grad();
    model->forward(at::randn({4, 5})).backward();
    optimizer->step(0.05);
  }
};

// Compares regardless of the order: the model's depends on its units.
void expect_same_state(Cells& cells, std::vector<NamedTensor> got, std::vector<NamedTensor> wanted,
                       const std::string& what) {
  std::ranges::sort(got, {}, &NamedTensor::name);
  std::ranges::sort(wanted, {}, &NamedTensor::name);
  cells.expect(got.size() == wanted.size(),
               fmt::format("{}: {} tensors, not {}", what, got.size(), wanted.size()));
  for (std::size_t index = 0; index < std::min(got.size(), wanted.size()); ++index) {
    cells.expect(got[index].name == wanted[index].name,
                 fmt::format("{}: '{}' where '{}' was", what, got[index].name, wanted[index].name));
    cells.expect_same(got[index].tensor, wanted[index].tensor, what + ": " + wanted[index].name);
  }
}

void check_round_trips(Cells& cells) {
  const StateDictOptions everywhere = {.rank0_only = false};
  cells.cell("what the whole state has", [&] {
    Training it(cells, 1, {});
    it.step(0);
    std::vector<std::string> wanted;
    for (const auto& item : it.model->named_parameters()) wanted.push_back(item.key());
    for (const auto& item : it.model->named_buffers()) wanted.push_back(item.key());
    std::ranges::sort(wanted);
    std::vector<std::string> got;
    for (const auto& [name, tensor] : it.parallel.full_state_dict(everywhere)) {
      got.push_back(name);
      cells.expect(tensor.is_cpu() && tensor.isfinite().all().item<bool>(), name);
      // The state is a copy: the next step does not change it, and it keeps no gathered memory.
      cells.expect(!tensor.requires_grad(), name + " is in a graph");
    }
    std::ranges::sort(got);
    cells.expect(got == wanted, "other names");
  });
  cells.cell("a state is a copy", [&] {
    Training it(cells, 1, {});
    it.step(0);
    const auto before = it.parallel.full_state_dict(everywhere);
    const auto optimizer_before = it.parallel.full_optimizer_state(*it.optimizer, everywhere);
    std::vector<NamedTensor> copies;
    for (const auto& [name, tensor] : before) copies.push_back({name, tensor.clone()});
    std::vector<NamedTensor> optimizer_copies;
    for (const auto& [name, tensor] : optimizer_before)
      optimizer_copies.push_back({name, tensor.clone()});
    it.step(1);
    expect_same_state(cells, before, copies, "the model");
    expect_same_state(cells, optimizer_before, optimizer_copies, "the optimizer");
  });
  cells.cell("on the first rank only, unless asked", [&] {
    Training it(cells, 1, {});
    it.step(0);
    cells.expect(it.parallel.full_state_dict().empty() == (cells.rank() != 0), "the model");
    cells.expect(it.parallel.full_optimizer_state(*it.optimizer, {}).empty() == (cells.rank() != 0),
                 "the optimizer");
    cells.expect(!it.parallel.full_state_dict(everywhere).empty(), "the model on every rank");
  });
  for (const auto& [name, options] : std::vector<std::pair<std::string, Options>>{
           {"the same units", {}},
           {"one unit", {.units = one_unit()}},
           {"a unit for each layer", {.units = units_of_size(1), .max_live_units = 1}},
           {"parameters whole", {.cut = Cut::gradients}}})
    cells.cell("training goes on to the bit, with " + name, [&] {
      Training first(cells, 1, {});
      for (int step = 0; step < 3; ++step) first.step(step);
      const auto model = first.parallel.full_state_dict();
      const auto optimizer = first.parallel.full_optimizer_state(*first.optimizer, {});
      Training second(cells, 99, options);
      second.step(7);
      second.parallel.load_full_state_dict(model);
      second.parallel.load_full_optimizer_state(*second.optimizer, optimizer);
      expect_same_state(cells, second.parallel.full_state_dict(everywhere),
                        first.parallel.full_state_dict(everywhere), "loaded");
      for (int step = 3; step < 6; ++step) {
        first.step(step);
        second.step(step);
      }
      expect_same_state(cells, second.parallel.full_state_dict(everywhere),
                        first.parallel.full_state_dict(everywhere), "the model");
      expect_same_state(cells, second.parallel.full_optimizer_state(*second.optimizer, everywhere),
                        first.parallel.full_optimizer_state(*first.optimizer, everywhere),
                        "the optimizer");
    });
  cells.cell("the optimizer's state is that of one that is not cut", [&] {
    Training it(cells, 1, {});
    torch::manual_seed(1);
    Many alone;
    const auto optimizer = optim::make_optimizer(
        optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*alone), 0.1));
    it.step(0);
    const auto whole = it.parallel.full_optimizer_state(*it.optimizer, everywhere);
    optimizer->load_state(whole);
    expect_same_state(cells, whole, optimizer->state(), "read by a whole one");
    it.parallel.load_full_optimizer_state(*it.optimizer, optimizer->state());
  });
  cells.cell("ZeRO-1's optimizer state, into FULL_SHARD's and back", [&] {
    torch::manual_seed(1);
    Many model;
    OptimizerShards shards(*model, cells.group());
    replicate::DistributedDataParallel replicas(*model, cells.group());
    const auto optimizer = shards.make_optimizer(
        optim::AdamWOptions{}, optim::decay_groups(data_parallel::trained_parameters(*model), 0.1));
    Training it(cells, 1, {});
    torch::manual_seed(0);
    model->forward(at::randn({4, 5})).backward();
    optimizer->step(0.05);
    const auto state = shards.full_optimizer_state(*optimizer, everywhere);
    it.parallel.load_full_optimizer_state(*it.optimizer, state);
    expect_same_state(cells, it.parallel.full_optimizer_state(*it.optimizer, everywhere), state,
                      "through FULL_SHARD");
    shards.load_full_optimizer_state(*optimizer, state);
    expect_same_state(cells, shards.full_optimizer_state(*optimizer, everywhere), state,
                      "through ZeRO-1");
  });
}

void check_wrong_states(Cells& cells) {
  // Changes the first rank's state; those of the others do not matter.
  const auto changed = [](std::vector<NamedTensor> state,
                          const std::function<void(std::vector<NamedTensor>&)>& change) {
    if (!state.empty()) change(state);
    return state;
  };
  using State = std::vector<NamedTensor>;
  cells.cell("a state that misses something, or has more, or of another shape", [&] {
    Training it(cells, 1, {});
    it.step(0);
    const State before = it.parallel.full_state_dict({.rank0_only = false});
    const State good = it.parallel.full_state_dict();
    const auto load = [&](const std::function<void(State&)>& change) {
      return [&, change] { it.parallel.load_full_state_dict(changed(good, change)); };
    };
    const std::string first = before.front().name;
    cells.expect_usage_error(load([](State& state) { state.erase(state.begin()); }), first);
    cells.expect_usage_error(load([](State& state) { state.pop_back(); }), before.back().name);
    cells.expect_usage_error(load([](State& state) {
                               state.push_back({"stranger", at::zeros({2})});
                             }),
                             "stranger");
    cells.expect_usage_error(load([](State& state) {
                               state.front().tensor = at::zeros({5, 6});
                             }),
                             first);
    cells.expect_usage_error(load([](State& state) { state.front().tensor = at::zeros({25}); }),
                             first);
    cells.expect_usage_error(load([](State& state) { state.front().tensor.reset(); }), first);
    cells.expect_usage_error(load([](State& state) { state.push_back(state.front()); }),
                             "tensors of");
    cells.expect_usage_error(load([](State& state) { state.clear(); }), first);
    expect_same_state(cells, it.parallel.full_state_dict({.rank0_only = false}), before,
                      "what was refused left traces");
  });
  cells.cell("an optimizer's state that misses something, or has more", [&] {
    Training it(cells, 1, {});
    it.step(0);
    const State before = it.parallel.full_optimizer_state(*it.optimizer, {.rank0_only = false});
    const State good = it.parallel.full_optimizer_state(*it.optimizer, {});
    const auto load = [&](const std::function<void(State&)>& change) {
      return [&, change] {
        it.parallel.load_full_optimizer_state(*it.optimizer, changed(good, change));
      };
    };
    const std::string name = "exp_avg.blocks.0.weight";
    const auto find = [&](State& state) {
      return std::ranges::find(state, name, &NamedTensor::name);
    };
    cells.expect_usage_error(load([&](State& state) { state.erase(find(state)); }), name);
    cells.expect_usage_error(load([](State& state) {
                               state.push_back({"exp_avg.stranger", at::zeros({2})});
                             }),
                             "exp_avg.stranger");
    cells.expect_usage_error(load([&](State& state) {
                               find(state)->tensor = at::zeros({5, 6});
                             }),
                             name);
    cells.expect_usage_error(load([&](State& state) { find(state)->tensor = at::zeros({25}); }),
                             name);
    cells.expect_usage_error(load([&](State& state) { find(state)->tensor.reset(); }), name);
    cells.expect_usage_error(load([](State& state) { state.clear(); }), before.front().name);
    expect_same_state(cells, it.parallel.full_optimizer_state(*it.optimizer, {.rank0_only = false}),
                      before, "what was refused left traces");
  });
  cells.cell("an optimizer of another model", [&] {
    Training one(cells, 1, {});
    Chain other(2);
    FullyShardedDataParallel parallel = sharded(cells, *other);
    const auto optimizer = adamw(parallel, *other);
    cells.expect_usage_error([&] { one.parallel.full_optimizer_state(*optimizer, {}); },
                             "layers.0.weight");
  });
}

}  // namespace

void check_state(Cells& cells) {
  check_round_trips(cells);
  check_wrong_states(cells);
}

}  // namespace lockstep::shard
