#include "model_parallel.h"

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/optim/sgd.h>

#include <lockstep/mesh/device_mesh.h>
#include <lockstep/mesh/tensor_part.h>
#include <lockstep/models/make_model.h>
#include <lockstep/parallel/replicate/distributed_data_parallel.h>
#include <lockstep/recompute/wrap_activation_checkpointing.h>

namespace lockstep::parity {

namespace {

using models::LanguageModel;
using models::ModelAxes;
using models::ModelConfig;
using ranks::Cells;

constexpr std::int64_t kLength = 16;
constexpr std::int64_t kSamples = 4;
constexpr std::int64_t kModelSteps = 5;

struct ModelLayout {
  int dp = 1;
  int cp = 1;
  int tp = 1;
  nn::BetweenLayers between = nn::BetweenLayers::whole;
  nn::ContextAlgorithm algorithm = nn::ContextAlgorithm::ring;
  nn::SplitKind split = nn::SplitKind::zigzag;

  std::string text() const {
    return fmt::format(
        "dp {} cp {}{} tp {}{}", dp, cp,
        cp == 1 ? "" : fmt::format(" ({}, {})", nn::name(algorithm), nn::name(split)), tp,
        between == nn::BetweenLayers::by_positions ? " by positions" : "");
  }
};

// What goes on in a step, whatever the layout.
struct StepWay {
  std::string name;
  std::int64_t num_passes = 1;
  double recomputed = 0;  // share of the blocks
};

struct ModelKind {
  std::string name;
  ModelConfig config;
};

std::vector<ModelKind> model_kinds() {
  // An odd vocabulary, so that parts of it differ; fewer key-value heads than some axes have ranks.
  const ModelConfig gpt{.family = models::Family::gpt2,
                        .vocab_size = 37,
                        .hidden_size = 32,
                        .num_layers = 2,
                        .num_heads = 4,
                        .max_positions = kLength,
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
  constexpr auto slices = nn::BetweenLayers::by_positions;
  switch (num_ranks) {
    case 1: return {{}};
    case 2:
      return {{.tp = 2},
              {.tp = 2, .between = slices},
              {.cp = 2},
              {.cp = 2, .split = nn::SplitKind::contiguous},
              {.cp = 2, .algorithm = all_to_all}};
    case 4:
      return {{.tp = 4},
              {.tp = 4, .between = slices},
              {.cp = 4},
              {.cp = 4, .algorithm = all_to_all},
              {.cp = 2, .tp = 2},
              {.cp = 2, .tp = 2, .between = slices, .algorithm = all_to_all},
              {.dp = 2, .tp = 2, .between = slices},
              {.dp = 2, .cp = 2}};
    case 8:
      return {{.dp = 2, .cp = 2, .tp = 2},
              {.dp = 2, .cp = 2, .tp = 2, .between = slices},
              {.cp = 2, .tp = 4, .between = slices},
              {.cp = 4, .tp = 2}};
    default: return {};
  }
}

std::pair<at::Tensor, at::Tensor> batch_of(std::int64_t step, const ModelConfig& config) {
  const at::Tensor text =
      (at::arange(kSamples * (kLength + 1), at::kLong) * (7 + step) + step * step)
          .remainder(config.vocab_size)
          .view({kSamples, kLength + 1});
  at::Tensor targets = text.narrow(1, 1, kLength).clone();
  targets[1].narrow(0, 3, 5).fill_(nn::kIgnoredTarget);
  return {text.narrow(1, 0, kLength).clone(), targets};
}

std::shared_ptr<LanguageModel> make(const ModelConfig& config, at::ScalarType type) {
  auto model = models::make_model(config, 5);
  model->to(type);
  return model;
}

torch::optim::SGD descent(const LanguageModel& model) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
}

// The samples of [first, first + count) of the batch, forward: their loss.
nn::LossSum loss_of(LanguageModel& model, std::int64_t step, std::int64_t first,
                    std::int64_t count) {
  const auto [tokens, targets] = batch_of(step, model.config());
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(first + i);
  model.set_random_position(static_cast<std::uint64_t>(step), rows);
  return model.loss(tokens.narrow(0, first, count), targets.narrow(0, first, count));
}

// The whole batch in one pass of one process. Returns the mean loss.
double reference_pass(LanguageModel& model, std::int64_t step) {
  const nn::LossSum loss = loss_of(model, step, 0, kSamples);
  (loss.sum / loss.count).backward();
  return loss.sum.item<double>() / static_cast<double>(loss.count);
}

// One rank's, of a mesh.
class SpreadModel {
 public:
  SpreadModel(const ModelConfig& config, at::ScalarType type, const ModelLayout& layout,
              const std::shared_ptr<comm::Communicator>& world)
      : mesh_(world, {{"dp_replicate", layout.dp}, {"cp", layout.cp}, {"tp", layout.tp}},
              {.flatten = {{"dp_replicate", "cp"}}}),
        model_(make(config, type)) {
    model_->spread({.tensor = layout.tp == 1 ? nullptr
                                             : std::make_shared<nn::TensorAxis>(mesh_.axis("tp"),
                                                                                layout.between),
                    .context = layout.cp == 1 ? nullptr : mesh_.axis("cp"),
                    .context_algorithm = layout.algorithm,
                    .context_split = layout.split});
    parallel_.emplace(*model_, mesh_.flatten({"dp_replicate", "cp"}));
    for (nn::CutParameter& one : nn::cut_parameters(*model_))
      cut_.emplace(one.name, std::move(one));
  }

  LanguageModel& model() { return *model_; }

  // Returns the mean loss of all ranks.
  double pass(std::int64_t step, std::int64_t num_passes) {
    const std::int64_t each = kSamples / (mesh_.size("dp_replicate") * num_passes);
    for (std::int64_t i = 0; i < num_passes; ++i) {
      std::optional<data_parallel::NoSync> no_sync;
      if (i + 1 < num_passes) no_sync.emplace(parallel_->no_sync());
      const nn::LossSum loss =
          loss_of(*model_, step, (mesh_.coordinate("dp_replicate") * num_passes + i) * each, each);
      parallel_->backward(loss.sum, loss.count);
    }
    return parallel_->totals().mean_loss();
  }

  // What a parameter, or its gradient, is as a whole.
  at::Tensor whole(const std::string& name, const at::Tensor& part) {
    const auto cut = cut_.find(name);
    if (cut == cut_.end()) return part;
    const mesh::Placement& placement = cut->second.placement;
    const at::Tensor whole = at::zeros(placement.shape(), part.options());
    if (mesh_.coordinate("tp") % cut->second.num_holders == 0)
      mesh::write_part(whole, placement, part.detach());
    mesh_.axis("tp")->all_reduce(whole).wait();
    return whole;
  }

 private:
  mesh::DeviceMesh mesh_;
  std::shared_ptr<LanguageModel> model_;
  std::optional<replicate::DistributedDataParallel> parallel_;
  std::map<std::string, nn::CutParameter> cut_;
};

void expect_near(Cells& cells, const at::Tensor& got, const at::Tensor& wanted, double tolerance,
                 const std::string& what) {
  if (!got.defined() || !wanted.defined()) return cells.expect_same(got, wanted, what);
  const double off = (got.reshape(wanted.sizes()) - wanted).abs().max().item<double>();
  const double size = std::max(wanted.abs().max().item<double>(), 1e-3);
  cells.expect(off <= tolerance * size,
               fmt::format("{} is off by {:.3g} of {:.3g}", what, off, size));
}

void check_layout(Cells& cells, const ModelKind& kind, const ModelLayout& layout,
                  const StepWay& way, at::ScalarType type) {
  const double tolerance = type == at::kDouble ? 1e-9 : 1e-5;
  const auto reference = make(kind.config, type);
  SpreadModel spread(kind.config, type, layout, cells.group());
  std::optional<SelectiveGradientCheckpointing> recomputed;
  if (way.recomputed > 0) recomputed.emplace(spread.model(), way.recomputed);
  auto reference_sgd = descent(*reference);
  auto spread_sgd = descent(spread.model());
  for (std::int64_t step = 0; step < kModelSteps; ++step) {
    reference_sgd.zero_grad();
    spread_sgd.zero_grad();
    const double wanted = reference_pass(*reference, step);
    const double got = spread.pass(step, way.num_passes);
    cells.expect(std::abs(got - wanted) <= tolerance * std::abs(wanted),
                 fmt::format("the loss of step {} is {} and not {}", step, got, wanted));
    for (const auto& item : reference->named_parameters()) {
      const at::Tensor mine = spread.model().named_parameters()[item.key()];
      expect_near(cells, spread.whole(item.key(), mine.grad()), item.value().grad(), tolerance,
                  fmt::format("the gradient of {} in step {}", item.key(), step));
    }
    reference_sgd.step();
    spread_sgd.step();
  }
  for (const auto& item : reference->named_parameters())
    expect_near(cells,
                spread.whole(item.key(), spread.model().named_parameters()[item.key()].detach()),
                item.value().detach(), tolerance, item.key());
}

}  // namespace

void check_model_parallel(Cells& cells) {
  const std::vector<StepWay> ways = {{"one pass"}, {"two passes, recomputed", 2, 1.0}};
  for (const ModelKind& kind : model_kinds())
    for (const ModelLayout& layout : layouts_of(cells.num_ranks()))
      for (const StepWay& way : ways) {
        if (way.num_passes * layout.dp > kSamples) continue;
        for (const at::ScalarType type : {at::kDouble, at::kFloat})
          cells.cell(fmt::format("{}, {}, {}, {}", kind.name, layout.text(), way.name,
                                 c10::toString(type)),
                     [&] { check_layout(cells, kind, layout, way, type); });
      }
}

}  // namespace lockstep::parity
