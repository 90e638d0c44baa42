#include "model_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include "references.h"
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

// A pipeline has fewer micro-batches than stages, as many, and more. Many processes on few cores
// take long: of those, one way for each layout.
std::vector<StepWay> ways_of(const ModelLayout& layout, Share share) {
  const StepWay two_passes{"two passes, recomputed", 2, 1.0};
  if (layout.num_ranks() >= (share == Share::everyday ? 8 : 16)) return {two_passes};
  std::vector<StepWay> ways = {{"one pass"}, two_passes};
  if (layout.pp > 1 && layout.data_ranks() == 1) ways.push_back({"four passes", 4});
  return ways;
}

// The cells that CI runs. A mistake that shows in 32 bits and not in 64 shows in every way of a
// step: CI looks at one. Qwen2 is Llama with biases, so that one way of each layout has to do.
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

constexpr double kModelRate = 0.2;
constexpr double kModelMaxNorm = 0.25;

// Where the values of one process are among its others.
std::string loss_of(std::int64_t step) { return fmt::format("loss of step {}", step); }
std::string norm_of(std::int64_t step) { return fmt::format("norm of step {}", step); }
std::string gradients_of(std::int64_t step) { return fmt::format("gradients {} of ", step); }
const std::string kWeights = "weights of ";

std::map<std::string, at::Tensor> below(const std::string& prefix, const Values& values) {
  std::map<std::string, at::Tensor> all;
  for (auto it = values.lower_bound(prefix); it != values.end() && it->first.starts_with(prefix);
       ++it)
    all.emplace(it->first.substr(prefix.size()), it->second);
  return all;
}

struct ModelCell {
  std::string name;
  ModelConfig config;
  ModelLayout layout;
  StepWay way;
  Numbers numbers;

  // All that one process's numbers depend on.
  std::string reference() const {
    return fmt::format("{} of {} layers, {} samples, {}", config.family, config.num_layers,
                       num_samples(layout, way), numbers.text());
  }
};

Values run_in_one_process(const ModelCell& cell) {
  const auto model = make_subject(cell.config, cell.numbers);
  std::vector<NamedTensor> parameters;
  for (const auto& item : model->named_parameters())
    parameters.push_back({item.key(), item.value()});
  const auto sgd =
      optim::make_optimizer(optim::SGDOptions{.momentum = 0.9},
                            optim::decay_groups(parameters, 0.01, optim::DecayRule::matrices));
  Values values;
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    const double loss =
        one_process_pass(*model, cell.numbers, step, num_samples(cell.layout, cell.way));
    values[loss_of(step)] = at::scalar_tensor(loss, at::kDouble);
    for (const auto& [name, tensor] : parameters)
      values[gradients_of(step) + name] = tensor.grad().cpu().clone();
    const double norm = optim::clip_gradients(parameters, kModelMaxNorm).norm;
    values[norm_of(step)] = at::scalar_tensor(norm, at::kDouble);
    sgd->step(kModelRate);
    model->zero_grad();
  }
  for (const auto& [name, tensor] : parameters) values[kWeights + name] = tensor.detach().cpu();
  return values;
}

void check_cell(Cells& cells, const ModelCell& cell, const Values& reference) {
  const double tolerance = cell.numbers.tolerance;
  SpreadModel spread(cell.config, cell.numbers, cell.layout, cell.way, cells.group());
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    const double wanted = reference.at(loss_of(step)).item<double>();
    const double got = spread.pass(step);
    cells.expect(std::abs(got - wanted) <= tolerance * std::abs(wanted),
                 fmt::format("the loss of step {} is {} and not {}", step, got, wanted));
    const auto gradients = spread.gradients();
    if (cells.rank() == 0)
      expect_all_near(cells, gradients, below(gradients_of(step), reference), tolerance,
                      fmt::format("gradients {}", step));
    const double norm = reference.at(norm_of(step)).item<double>();
    // Or there would be nothing to see of it.
    cells.expect(norm > kModelMaxNorm, fmt::format("a norm of {} is not clipped", norm));
    const double spread_norm = spread.clip(kModelMaxNorm);
    cells.expect(std::abs(spread_norm - norm) <= tolerance * norm,
                 fmt::format("the norm of step {} is {} and not {}", step, spread_norm, norm));
    spread.step(kModelRate);
  }
  const auto weights = spread.weights();
  if (cells.rank() == 0)
    expect_all_near(cells, weights, below(kWeights, reference), tolerance, "weights");
}

void check_layouts(Cells& cells, const std::vector<Numbers>& all_numbers, Share share) {
  std::vector<ModelCell> all;
  References references;
  for (const ModelKind& kind : model_kinds())
    for (const ModelLayout& layout : layouts_of(cells.num_ranks(), share))
      for (const StepWay& way : ways_of(layout, share))
        for (const Numbers& numbers : all_numbers) {
          ModelCell cell{.name = fmt::format("{}, {}, {}, {}", kind.name, layout.text(), way.name,
                                             numbers.text()),
                         .config = kind.config,
                         .layout = layout,
                         .way = way,
                         .numbers = numbers};
          cell.config.num_layers = layout.num_layers();
          if (!runs(kind, numbers, layout, way, share) || !cells.runs(cell.name)) continue;
          references.add(cell.reference(), [cell] { return run_in_one_process(cell); });
          all.push_back(std::move(cell));
        }
  references.compute(*cells.group(), all_numbers.front().device);
  for (const ModelCell& cell : all)
    cells.cell(cell.name, [&] { check_cell(cells, cell, references.of(cell.reference())); });
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
