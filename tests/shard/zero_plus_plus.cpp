#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/utils.h>

#include <lockstep/comm/quantized.h>

#include "chain.h"
#include "tables.h"

namespace lockstep::shard {

namespace {

using ranks::Cells;

const ZeroPlusPlusConfig kQuantizedWeights = {.quantize_weights = true};
const ZeroPlusPlusConfig kQuantizedGradients = {.quantize_gradients = true};
const ZeroPlusPlusConfig kNodesOfTwo = {.hierarchical_partition = 2};
const ZeroPlusPlusConfig kAllOfIt = {
    .quantize_weights = true, .quantize_gradients = true, .hierarchical_partition = 2};

struct PlusPlusTraining {
  Chain model;
  Groups groups;
  FullyShardedDataParallel parallel;
  std::unique_ptr<optim::Optimizer> optimizer;

  // The width is divided by neither ranks nor blocks.
  PlusPlusTraining(Cells& cells, const ZeroPlusPlusConfig& config, std::int64_t width = 37,
                   const MixedPrecision& precision = {})
      : model(seeded(width)),
        groups(shard_over(cells.group())),
        parallel(
            *model, groups,
            scrubbed(
                {.mixed_precision = precision, .zero_plus_plus = config, .max_live_units = 1})),
        optimizer(adamw(parallel, *model)) {}

  static Chain seeded(std::int64_t width) {
    torch::manual_seed(11);
    return Chain(4, width);
  }

  double step(const Cells& cells, int number, double learning_rate = 0.01) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * number + cells.rank()));
    const at::Tensor input = at::randn({6, model->layer(0).weight.size(1)});
    optimizer->zero_grad();
    const at::Tensor loss = (model->forward(input) - 0.3).pow(2).mean();
    loss.backward();
    optimizer->step(learning_rate);
    return loss.item<double>();
  }
};

void check_weights(Cells& cells) {
  cells.cell("weights are what int8 leaves of them, the same on every rank", [&] {
    PlusPlusTraining it(cells, kQuantizedWeights);
    for (int step = 0; step < 3; ++step) it.step(cells, step);
    const auto masters = it.parallel.full_state_dict({.rank0_only = false});
    const auto held = it.parallel.full_parameters();
    bool differs = false;
    for (const auto& [name, master] : masters) {
      const at::Tensor weight = it.model->named_parameters()[name].detach().clone();
      differs = differs || !at::equal(weight, master);
      cells.expect(
          (weight - master).abs().max().item<float>() <= master.abs().max().item<float>() / 100,
          name + " is further off than int8 makes it");
      const at::Tensor of_first = weight.clone();
      cells.group()->broadcast(of_first, 0).wait();
      cells.expect_same(weight, of_first, name + " against the first rank's");
    }
    cells.expect(differs, "no weight lost a digit, so none was quantized");
  });
  cells.cell("an edit leaves other elements the digits that int8 has not", [&] {
    PlusPlusTraining it(cells, kQuantizedWeights);
    const auto before = it.parallel.full_state_dict({.rank0_only = false});
    {
      const c10::NoGradGuard no_grad;
      it.model->layer(1).weight.select(0, 2).fill_(0.5);
      // Now blocks have other scales than those that were gathered.
      it.model->layer(1).weight.select(0, 4).fill_(9);
      it.model->layer(1).bias.zero_();
    }
    const auto after = it.parallel.full_state_dict({.rank0_only = false});
    for (std::size_t i = 0; i < before.size(); ++i) {
      const at::Tensor wanted = before[i].tensor.clone();
      if (before[i].name == "layers.1.weight") {
        wanted.select(0, 2).fill_(0.5);
        wanted.select(0, 4).fill_(9);
      }
      if (before[i].name == "layers.1.bias") wanted.zero_();
      cells.expect_same(after[i].tensor, wanted, before[i].name);
    }
  });
}

void check_gradients(Cells& cells) {
  cells.cell("gradients are near those of floats, the same in parts and as a whole", [&] {
    for (const bool two_hops : {false, true}) {
      ZeroPlusPlusConfig config = kQuantizedGradients;
      if (two_hops) config.hierarchical_partition = 2;
      PlusPlusTraining got(cells, config);
      PlusPlusTraining wanted(cells, {});
      torch::manual_seed(static_cast<std::uint64_t>(cells.rank()));
      const at::Tensor input = at::randn({6, 37});
      for (PlusPlusTraining* one : {&got, &wanted}) {
        {
          const auto here = one->parallel.no_sync();
          one->model->forward(input).pow(2).mean().backward();
        }
        one->model->forward(input * 0.5).pow(2).mean().backward();
      }
      for (const auto& [name, parameter] : data_parallel::trained_parameters(*wanted.model)) {
        const at::Tensor right = wanted.parallel.full_gradient(name);
        const at::Tensor near = got.parallel.full_gradient(name);
        cells.expect((near - right).norm().item<float>() < 0.25 * right.norm().item<float>(),
                     fmt::format("the gradient of {} is far off", name));
        cells.expect(!at::equal(near, right), name + " lost no digit, so was not quantized");
      }
      const auto clipped = got.parallel.clip_gradients(1e-3);
      cells.expect(clipped.clipped, "gradients were not clipped");
    }
  });
}

// The bytes that this rank sent, in all groups that a step uses.
std::uint64_t bytes_to_other_nodes(const Cells& cells, const PlusPlusTraining& it,
                                   int ranks_per_node) {
  std::uint64_t total = 0;
  for (const auto& group :
       {it.groups.all, it.groups.gather, it.groups.reduce, it.parallel.nodes().gather,
        it.parallel.nodes().reduce.inside, it.parallel.nodes().reduce.across}) {
    if (group == nullptr) continue;
    const auto sent = group->sent_bytes();
    for (std::size_t peer = 0; peer < sent->size(); ++peer)
      if (group->global_ranks()[peer] / ranks_per_node != cells.rank() / ranks_per_node)
        total += (*sent)[peer];
  }
  return total;
}

std::uint64_t bytes_of_a_step(Cells& cells, const ZeroPlusPlusConfig& config,
                              const MixedPrecision& precision) {
  PlusPlusTraining it(cells, config, 256, precision);
  for (int step = 0; step < 2; ++step) it.step(cells, step);
  const std::uint64_t before = bytes_to_other_nodes(cells, it, 2);
  it.step(cells, 2);
  at::Tensor sent =
      at::full({1}, static_cast<double>(bytes_to_other_nodes(cells, it, 2) - before), at::kDouble);
  cells.group()->all_reduce(sent).wait();
  return static_cast<std::uint64_t>(sent.item<double>());
}

void check_bytes(Cells& cells) {
  if (cells.num_ranks() != 4) return;
  cells.cell("bytes between nodes are a quarter of ZeRO-3's in 16 bits, and the scales", [&] {
    const MixedPrecision bf16 = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
    const double plain = static_cast<double>(bytes_of_a_step(cells, {}, bf16));
    const double less = static_cast<double>(bytes_of_a_step(cells, kAllOfIt, bf16));
    const double floats = static_cast<double>(bytes_of_a_step(cells, {}, {}));
    std::printf("bytes between nodes in a step: ZeRO-3 %.0f in floats, %.0f in bf16; ZeRO++ %.0f\n",
                floats, plain, less);
    cells.expect(less <= plain / 4, fmt::format("{} of {}", less, plain));
    cells.expect(plain < 0.6 * floats, fmt::format("{} in bf16, {} in floats", plain, floats));
  });
}

void check_nodes(Cells& cells) {
  cells.cell("a copy in each node changes no bit", [&] {
    PlusPlusTraining got(cells, kNodesOfTwo);
    PlusPlusTraining wanted(cells, {});
    for (int step = 0; step < 5; ++step) {
      const double mine = got.step(cells, step);
      const double other = wanted.step(cells, step);
      cells.expect(mine == other,
                   fmt::format("step {}: the loss is {}, not {}", step, mine, other));
      // A change of the weights between steps reaches the nodes' copies.
      const c10::NoGradGuard no_grad;
      for (PlusPlusTraining* one : {&got, &wanted}) one->model->layer(2).bias.add_(0.01);
    }
    const auto weights = got.parallel.full_state_dict({.rank0_only = false});
    const auto others = wanted.parallel.full_state_dict({.rank0_only = false});
    for (std::size_t i = 0; i < weights.size(); ++i)
      cells.expect_same(weights[i].tensor, others[i].tensor, weights[i].name);
  });
  cells.cell("all of it trains as floats do", [&] {
    PlusPlusTraining got(cells, kAllOfIt);
    PlusPlusTraining wanted(cells, {});
    double first = 0;
    double mine = 0;
    double other = 0;
    for (int step = 0; step < 60; ++step) {
      mine = got.step(cells, step);
      other = wanted.step(cells, step);
      if (step == 0) first = other;
    }
    cells.expect(std::abs(mine - other) < 0.005 * first,
                 fmt::format("from {} the loss went to {}, with floats to {}", first, mine, other));
    cells.expect(other < 0.01 * first, "the test's own model does not learn");
  });
  cells.cell("nodes that ranks cannot be divided into, and types that cannot be quantized", [&] {
    cells.expect_usage_error(
        [&] { PlusPlusTraining(cells, {.hierarchical_partition = 3}); },
        fmt::format("hierarchical_partition of 3 among {} ranks", cells.num_ranks()));
    cells.expect_usage_error([&] { PlusPlusTraining(cells, {.hierarchical_partition = -1}); },
                             "hierarchical_partition of -1");
    Chain whole(2);
    cells.expect_usage_error(
        [&] {
          FullyShardedDataParallel(*whole, shard_over(cells.group()),
                                   {.cut = Cut::gradients, .zero_plus_plus = kQuantizedWeights});
        },
        "use FULL_SHARD");
    Chain doubles(2);
    doubles->to(at::kDouble);
    cells.expect_usage_error(
        [&] {
          FullyShardedDataParallel(*doubles, shard_over(cells.group()),
                                   {.zero_plus_plus = kQuantizedWeights});
        },
        "is Double");
  });
}

}  // namespace

void check_zero_plus_plus(Cells& cells) {
  check_weights(cells);
  check_gradients(cells);
  check_bytes(cells);
  check_nodes(cells);
}

}  // namespace lockstep::shard
