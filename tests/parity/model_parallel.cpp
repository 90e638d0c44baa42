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
  // The vocabulary is odd, so that its parts differ; there are fewer key-value heads than some axes
  // have ranks.
  const ModelConfig gpt{.family = "gpt2",
                        .vocab_size = 37,
                        .hidden_size = 32,
                        .num_heads = 4,
                        .max_positions = kModelLength,
                        .dropout = 0.1};
  ModelConfig llama = gpt;
  llama.family = "llama";
  llama.num_kv_heads = 2;
  llama.intermediate_size = 48;
  llama.tie_embeddings = false;
  ModelConfig qwen2 = llama;
  qwen2.family = "qwen2";
  qwen2.tie_embeddings = true;
  return {{"GPT", gpt}, {"Llama", llama}, {"Qwen2", qwen2}};
}

// A pipeline gets fewer micro-batches than stages, equally many, and more. Many processes take long
// on few cores, so layouts with many ranks run only one way.
std::vector<StepWay> ways_of(const ModelLayout& layout, Share share) {
  const StepWay two_passes{"two passes, recomputed", 2, 1.0};
  if (layout.num_ranks() >= (share == Share::everyday ? 8 : 16)) return {two_passes};
  std::vector<StepWay> ways = {{"one pass"}, two_passes};
  if (layout.pp > 1 && layout.data_ranks() == 1) ways.push_back({"four passes", 4});
  return ways;
}

// Selects the cells that CI runs. A mistake that shows in 32 bits and not in 64 shows in every way
// of a step, so CI runs one. Qwen2 is Llama with biases, so one way of each layout is enough.
bool runs(const ModelKind& kind, const Numbers& numbers, const ModelLayout& layout,
          const StepWay& way, Share share) {
  if (share == Share::whole) return true;
  const bool one_way = layout.num_ranks() < 8 && way.recomputed > 0;
  if (kind.config.family == "qwen2" && !one_way) return false;
  const bool widest = numbers.type == at::kDouble;
  if (kind.config.family == "qwen2" && numbers.device == at::kCPU) return widest;
  return numbers.type != at::kFloat || one_way;
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
  constexpr double kMaxNorm = 0.25;
  const double tolerance = numbers.tolerance;
  ModelConfig config = kind.config;
  config.num_layers = layout.num_layers();
  const auto reference = make_subject(config, numbers);
  std::vector<NamedTensor> parameters;
  for (const auto& item : reference->named_parameters())
    parameters.push_back({item.key(), item.value()});
  const auto sgd =
      optim::make_optimizer(optim::SGDOptions{.momentum = 0.9},
                            optim::decay_groups(parameters, 0.01, optim::DecayRule::matrices));
  SpreadModel spread(config, numbers, layout, way, cells.group());
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    const double wanted = one_process_pass(*reference, numbers, step, num_samples(layout, way));
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
    // Otherwise clipping would have no effect to compare.
    cells.expect(norm > kMaxNorm, fmt::format("a norm of {} is not clipped", norm));
    const double spread_norm = spread.clip(kMaxNorm);
    cells.expect(std::abs(spread_norm - norm) <= tolerance * norm,
                 fmt::format("the norm of step {} is {} and not {}", step, spread_norm, norm));
    sgd->step(kRate);
    reference->zero_grad();
    spread.step(kRate);
  }
  const auto weights = spread.weights();
  if (cells.rank() != 0) return;
  std::map<std::string, at::Tensor> whole;
  for (const auto& [name, tensor] : parameters) whole.emplace(name, tensor.detach());
  expect_all_near(cells, weights, whole, tolerance, "weights");
}

void check_layouts(Cells& cells, const std::vector<Numbers>& all_numbers, Share share) {
  for (const ModelKind& kind : model_kinds())
    for (const ModelLayout& layout : layouts_of(cells.num_ranks(), share))
      for (const StepWay& way : ways_of(layout, share))
        for (const Numbers& numbers : all_numbers)
          if (runs(kind, numbers, layout, way, share))
            cells.cell(
                fmt::format("{}, {}, {}, {}", kind.name, layout.text(), way.name, numbers.text()),
                [&] { check_layout(cells, kind, layout, way, numbers); });
}

std::vector<Numbers> numbers_of_cpus() {
  return {{.type = at::kDouble, .tolerance = 1e-9}, {.type = at::kFloat, .tolerance = 1e-5}};
}

std::vector<Numbers> numbers_of_gpus() {
  return {
      {.type = at::kFloat, .device = at::kCUDA, .tolerance = 1e-4},
      {.type = at::kFloat, .computed_in = at::kBFloat16, .device = at::kCUDA, .tolerance = 6e-2}};
}

}  // namespace

void check_some_model_parallel(Cells& cells) {
  check_layouts(cells, numbers_of_cpus(), Share::everyday);
}

void check_model_parallel(Cells& cells) { check_layouts(cells, numbers_of_cpus(), Share::whole); }

void check_some_model_parallel_on_gpu(Cells& cells) {
  check_layouts(cells, numbers_of_gpus(), Share::everyday);
}

void check_model_parallel_on_gpu(Cells& cells) {
  check_layouts(cells, numbers_of_gpus(), Share::whole);
}

}  // namespace lockstep::parity
