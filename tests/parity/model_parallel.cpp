#include "model_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include "spread_model.h"

namespace lockstep::parity {

namespace {

using models::ModelConfig;
using ranks::Cells;

constexpr std::int64_t kModelSteps = 5;

struct ModelKind {
  std::string name;
  ModelConfig config;
};

std::vector<ModelKind> model_kinds() {
  // An odd vocabulary, so that parts of it differ; fewer key-value heads than some axes have ranks.
  const ModelConfig gpt{.family = models::Family::gpt2,
                        .vocab_size = 37,
                        .hidden_size = 32,
                        .num_layers = 4,
                        .num_heads = 4,
                        .max_positions = kModelLength,
                        .dropout = 0.1};
  ModelConfig llama = gpt;
  llama.family = models::Family::llama;
  llama.num_kv_heads = 2;
  llama.intermediate_size = 48;
  llama.tie_embeddings = false;
  return {{"GPT", gpt}, {"Llama", llama}};
}

std::vector<ModelLayout> layouts_of(int num_ranks) {
  using enum nn::ContextAlgorithm;
  using enum pipeline::ScheduleKind;
  constexpr auto slices = nn::BetweenLayers::by_positions;
  switch (num_ranks) {
    case 1: return {{}};
    case 2:
      return {{.tp = 2},
              {.tp = 2, .between = slices},
              {.cp = 2},
              {.cp = 2, .split = nn::SplitKind::contiguous},
              {.cp = 2, .algorithm = all_to_all},
              {.pp = 2, .schedule = gpipe},
              {.pp = 2},
              {.pp = 2, .schedule = interleaved, .chunks = 2},
              {.pp = 2, .schedule = zb_h1},
              {.pp = 2, .schedule = zb_v, .chunks = 2}};
    case 4:
      return {{.tp = 4},
              {.tp = 4, .between = slices},
              {.cp = 4},
              {.cp = 4, .algorithm = all_to_all},
              {.cp = 2, .tp = 2},
              {.cp = 2, .tp = 2, .between = slices, .algorithm = all_to_all},
              {.dp = 2, .tp = 2, .between = slices},
              {.dp = 2, .cp = 2},
              {.pp = 4, .schedule = gpipe},
              {.pp = 4},
              {.pp = 4, .schedule = zb_h1},
              {.pp = 2, .tp = 2, .between = slices},
              {.pp = 2, .cp = 2, .schedule = zb_h1},
              {.pp = 2, .dp = 2, .schedule = zb_v, .chunks = 2},
              {.dp = 2, .tp = 2, .strategy = ShardingStrategy::FULL_SHARD},
              {.dp = 2, .cp = 2, .strategy = ShardingStrategy::SHARD_GRAD_OP},
              {.pp = 2, .dp = 2, .strategy = ShardingStrategy::SHARD_OPTIMIZER},
              {.pp = 2, .dp = 2, .strategy = ShardingStrategy::FULL_SHARD}};
    case 8:
      return {{.dp = 2, .cp = 2, .tp = 2},
              {.dp = 2, .cp = 2, .tp = 2, .between = slices},
              {.cp = 2, .tp = 4, .between = slices},
              {.pp = 2, .dp = 2, .tp = 2},
              {.pp = 2, .cp = 2, .tp = 2, .between = slices, .schedule = zb_v, .chunks = 2},
              {.pp = 2, .dp = 2, .cp = 2, .schedule = interleaved, .chunks = 2},
              {.pp = 4, .tp = 2, .between = slices, .schedule = zb_h1},
              {.pp = 2,
               .dp = 2,
               .tp = 2,
               .between = slices,
               .schedule = zb_h1,
               .strategy = ShardingStrategy::FULL_SHARD},
              {.dp = 2,
               .cp = 2,
               .tp = 2,
               .between = slices,
               .strategy = ShardingStrategy::HYBRID_SHARD,
               .copies = 2}};
    default: return {};
  }
}

// A pipeline has fewer micro-batches than stages, as many, and more.
std::vector<StepWay> ways_of(const ModelLayout& layout) {
  std::vector<StepWay> ways = {{"one pass"}, {"two passes, recomputed", 2, 1.0}};
  if (layout.pp > 1 && layout.dp == 1) ways.push_back({"four passes", 4});
  return ways;
}

void expect_near(Cells& cells, const at::Tensor& got, const at::Tensor& wanted, double tolerance,
                 const std::string& what) {
  const double off = (got.cpu() - wanted.cpu()).abs().max().item<double>();
  const double size = std::max(wanted.abs().max().item<double>(), 1e-3);
  cells.expect(off <= tolerance * size,
               fmt::format("{} is off by {:.3g} of {:.3g}", what, off, size));
}

void expect_all_near(Cells& cells, const std::map<std::string, at::Tensor>& got,
                     const std::map<std::string, at::Tensor>& wanted, double tolerance,
                     const std::string& what) {
  cells.expect(got.size() == wanted.size(),
               fmt::format("there are {} {} and not {}", got.size(), what, wanted.size()));
  for (const auto& [name, tensor] : wanted)
    if (got.contains(name))
      expect_near(cells, got.at(name), tensor, tolerance, fmt::format("{} of {}", what, name));
}

void check_layout(Cells& cells, const ModelKind& kind, const ModelLayout& layout,
                  const StepWay& way, const Numbers& numbers) {
  constexpr double kRate = 0.2;
  constexpr double kMaxNorm = 0.5;
  const double tolerance = numbers.tolerance;
  const auto reference = make_subject(kind.config, numbers);
  std::vector<NamedTensor> parameters;
  for (const auto& item : reference->named_parameters())
    parameters.push_back({item.key(), item.value()});
  std::unique_ptr<optim::Optimizer> sgd;
  if (numbers.steps())
    sgd = optim::make_optimizer(optim::SGDOptions{.momentum = 0.9},
                                optim::decay_groups(parameters, 0.01, optim::DecayRule::matrices));
  SpreadModel spread(kind.config, numbers, layout, way, cells.group());
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    const double wanted = one_process_pass(*reference, step);
    const double got = spread.pass(step);
    cells.expect(std::abs(got - wanted) <= tolerance * std::abs(wanted),
                 fmt::format("the loss of step {} is {} and not {}", step, got, wanted));
    const auto gradients = spread.gradients();
    if (cells.rank() == 0) {
      std::map<std::string, at::Tensor> whole;
      for (const auto& [name, tensor] : parameters) whole.emplace(name, tensor.grad());
      expect_all_near(cells, gradients, whole, tolerance, fmt::format("gradients {}", step));
    }
    const double norm = optim::clip_gradients(parameters, kMaxNorm).norm;
    const double spread_norm = spread.clip(kMaxNorm);
    cells.expect(std::abs(spread_norm - norm) <= tolerance * norm,
                 fmt::format("the norm of step {} is {} and not {}", step, spread_norm, norm));
    if (sgd != nullptr) sgd->step(kRate);
    reference->zero_grad();
    spread.step(kRate);
  }
  const auto weights = spread.weights();
  if (cells.rank() != 0) return;
  std::map<std::string, at::Tensor> whole;
  for (const auto& [name, tensor] : parameters) whole.emplace(name, tensor.detach());
  expect_all_near(cells, weights, whole, tolerance, "weights");
}

// Many processes on few cores take long: of eight ranks, one way for each layout.
enum class Ways { all, one_of_eight_ranks };

void check_layouts(Cells& cells, const std::vector<Numbers>& all_numbers, Ways ways) {
  for (const ModelKind& kind : model_kinds())
    for (const ModelLayout& layout : layouts_of(cells.num_ranks()))
      for (const StepWay& way : ways_of(layout)) {
        if (ways == Ways::one_of_eight_ranks && cells.num_ranks() == 8 && way.recomputed == 0)
          continue;
        for (const Numbers& numbers : all_numbers) {
          if (!numbers.steps() && layout.strategy != ShardingStrategy::NO_SHARD) continue;
          cells.cell(
              fmt::format("{}, {}, {}, {}", kind.name, layout.text(), way.name, numbers.text()),
              [&] { check_layout(cells, kind, layout, way, numbers); });
        }
      }
}

std::vector<Numbers> numbers_of_cpus() {
  return {{.type = at::kDouble, .tolerance = 1e-9}, {.type = at::kFloat, .tolerance = 1e-5}};
}

}  // namespace

void check_some_model_parallel(Cells& cells) {
  check_layouts(cells, numbers_of_cpus(), Ways::one_of_eight_ranks);
}

void check_model_parallel(Cells& cells) { check_layouts(cells, numbers_of_cpus(), Ways::all); }

void check_model_parallel_on_gpu(Cells& cells) {
  check_layouts(cells,
                {{.type = at::kFloat, .device = at::kCUDA, .tolerance = 1e-4},
                 {.type = at::kBFloat16, .device = at::kCUDA, .tolerance = 6e-2}},
                Ways::all);
}

}  // namespace lockstep::parity
