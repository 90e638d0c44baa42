#include "model_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/optim/sgd.h>

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
              {.pp = 2, .dp = 2, .schedule = zb_v, .chunks = 2}};
    case 8:
      return {{.dp = 2, .cp = 2, .tp = 2},
              {.dp = 2, .cp = 2, .tp = 2, .between = slices},
              {.cp = 2, .tp = 4, .between = slices},
              {.pp = 2, .dp = 2, .tp = 2},
              {.pp = 2, .cp = 2, .tp = 2, .between = slices, .schedule = zb_v, .chunks = 2},
              {.pp = 2, .dp = 2, .cp = 2, .schedule = interleaved, .chunks = 2},
              {.pp = 4, .tp = 2, .between = slices, .schedule = zb_h1}};
    default: return {};
  }
}

// A pipeline has fewer micro-batches than stages, as many, and more.
std::vector<StepWay> ways_of(const ModelLayout& layout) {
  std::vector<StepWay> ways = {{"one pass"}, {"two passes, recomputed", 2, 1.0}};
  if (layout.pp > 1 && layout.dp == 1) ways.push_back({"four passes", 4});
  return ways;
}

torch::optim::SGD descent(const models::LanguageModel& model) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
}

void expect_near(Cells& cells, const at::Tensor& got, const at::Tensor& wanted, double tolerance,
                 const std::string& what) {
  const double off = (got - wanted).abs().max().item<double>();
  const double size = std::max(wanted.abs().max().item<double>(), 1e-3);
  cells.expect(off <= tolerance * size,
               fmt::format("{} is off by {:.3g} of {:.3g}", what, off, size));
}

void check_layout(Cells& cells, const ModelKind& kind, const ModelLayout& layout,
                  const StepWay& way, at::ScalarType type) {
  const double tolerance = type == at::kDouble ? 1e-9 : 1e-5;
  const auto reference = make_subject(kind.config, type);
  SpreadModel spread(kind.config, type, layout, way, cells.group());
  const auto mine = spread.model().named_parameters();
  auto reference_sgd = descent(*reference);
  auto spread_sgd = descent(spread.model());
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    reference_sgd.zero_grad();
    spread_sgd.zero_grad();
    const double wanted = one_process_pass(*reference, step);
    const double got = spread.pass(step);
    cells.expect(std::abs(got - wanted) <= tolerance * std::abs(wanted),
                 fmt::format("the loss of step {} is {} and not {}", step, got, wanted));
    for (const auto& item : reference->named_parameters()) {
      const at::Tensor* const part = mine.find(item.key());
      const at::Tensor gradient = item.value().grad();
      expect_near(
          cells, spread.whole(item.key(), part != nullptr ? part->grad() : at::Tensor(), gradient),
          gradient, tolerance, fmt::format("the gradient of {} in step {}", item.key(), step));
    }
    reference_sgd.step();
    spread_sgd.step();
  }
  for (const auto& item : reference->named_parameters()) {
    const at::Tensor* const part = mine.find(item.key());
    const at::Tensor weight = item.value().detach();
    expect_near(cells,
                spread.whole(item.key(), part != nullptr ? part->detach() : at::Tensor(), weight),
                weight, tolerance, item.key());
  }
}

}  // namespace

void check_model_parallel(Cells& cells) {
  for (const ModelKind& kind : model_kinds())
    for (const ModelLayout& layout : layouts_of(cells.num_ranks()))
      for (const StepWay& way : ways_of(layout))
        for (const at::ScalarType type : {at::kDouble, at::kFloat})
          cells.cell(fmt::format("{}, {}, {}, {}", kind.name, layout.text(), way.name,
                                 c10::toString(type)),
                     [&] { check_layout(cells, kind, layout, way, type); });
}

}  // namespace lockstep::parity
