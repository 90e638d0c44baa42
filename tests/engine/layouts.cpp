#include "layouts.h"

#include <algorithm>

#include <spdlog/fmt/fmt.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <lockstep/base/hash.h>
#include <lockstep/data/data_loader.h>

namespace lockstep {

using nlohmann::json;

namespace {

constexpr double kRate = 0.05, kMomentum = 0.9, kClipping = 0.5;

// How a layout uses its ranks; what is left of them is the data's.
struct Use {
  const char* strategy = "NO_SHARD";
  int ranks_per_copy = 0;  // of HYBRID_SHARD
  int tensor = 1;
  int pipeline = 1;
  const char* schedule = "1f1b";
  json more = json::object();  // of the section `parallel`
};

Layout layout_of(const Subject& subject, int num_ranks, const Use& use) {
  Layout layout{.name = use.strategy,
                .keys = {{"sharding_strategy", use.strategy}},
                .num_axes = 0,
                .data = num_ranks / use.tensor / use.pipeline};
  if (use.ranks_per_copy > 0) {
    layout.keys["fsdp"] = {{"ranks_per_copy", use.ranks_per_copy}};
    layout.name += fmt::format(" of {}", use.ranks_per_copy);
    if (use.ranks_per_copy > 1 && use.ranks_per_copy < layout.data) ++layout.num_axes;
  }
  if (layout.data > 1) ++layout.num_axes;
  json parallel = use.more;
  if (use.tensor > 1) {
    ++layout.num_axes;
    parallel["tensor"] = use.tensor;
    layout.keys["tensor_plan"] = subject.tensor_plan;
    layout.name = fmt::format("tensor {}, {}", use.tensor, layout.name);
  }
  if (use.pipeline > 1) {
    ++layout.num_axes;
    parallel["pipeline"] = use.pipeline;
    parallel["schedule"] = use.schedule;
    layout.name = fmt::format("pipeline {}, {}, {}", use.pipeline, use.schedule, layout.name);
  }
  if (!parallel.empty()) layout.keys["parallel"] = std::move(parallel);
  return layout;
}

constexpr const char* kPlainStrategies[] = {"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP",
                                            "FULL_SHARD"};

}  // namespace

std::vector<Subject> subjects() {
  return {{.name = "an MLP",
           .make = make<plain::Mlp>,
           .tensor_plan = {{"first", "column"}, {"second", "row"}}},
          // Statistics are those of a whole step only where a step is one pass.
          {.name = "convolutions with batch norm",
           .make = make<plain::ConvNet>,
           .num_samples = 40,
           .batch = 16,
           .micro = 0,
           .has_batch_norm = true,
           .tensor_plan = {{"head", "row"}}},
          {.name = "an LSTM", .make = make<plain::Recurrent>, .tensor_plan = {{"head", "row"}}},
          {.name = "a TransformerEncoder",
           .make = make<plain::Encoder>,
           .tensor_plan = {{"encoder.layers.*.self_attn", "heads"},
                           {"encoder.layers.*.linear1", "column"},
                           {"encoder.layers.*.linear2", "row"}}},
          {.name = "a GPT",
           .make = make<plain::Gpt>,
           .tensor_plan = {{"blocks.*.qkv", "qkv"},
                           {"blocks.*.out", "row"},
                           {"blocks.*.fc1", "column"},
                           {"blocks.*.fc2", "row"}}}};
}

std::vector<Layout> layouts(const Subject& subject, int num_ranks) {
  std::vector<Layout> all;
  const auto add = [&](const Use& use) { all.push_back(layout_of(subject, num_ranks, use)); };
  if (num_ranks < 8)
    for (const char* strategy : kPlainStrategies) add({.strategy = strategy});
  if (num_ranks % 2 == 0) add({.strategy = "HYBRID_SHARD", .ranks_per_copy = 2});
  if (num_ranks == 8) add({.strategy = "HYBRID_SHARD", .ranks_per_copy = 4});
  if (subject.tensor_plan.is_null() || num_ranks % 2 != 0) return all;
  if (num_ranks == 8) add({.strategy = "HYBRID_SHARD", .ranks_per_copy = 2, .tensor = 2});
  // The others have enough layouts in stages.
  if (num_ranks == 8 && !subject.has_batch_norm) return all;
  for (const char* strategy : kPlainStrategies) {
    add({.strategy = strategy, .tensor = 2});
    if (num_ranks == 2) break;
  }
  return all;
}

std::vector<Layout> pipelines(const Subject& subject, int num_ranks) {
  const auto model = subject.make();
  const std::vector<pipeline::ModelBlock> blocks = model->pipeline_blocks();
  const auto num_blocks = static_cast<int>(blocks.size());
  const auto num_trained = std::ranges::count_if(blocks, [](const auto& block) {
    return std::ranges::any_of(block.modules.front()->parameters(),
                               [](const at::Tensor& one) { return one.requires_grad(); });
  });
  std::vector<Layout> all;
  const auto add = [&](int stages, const Use& use) {
    if (num_ranks % use.pipeline != 0 || stages > num_trained) return;
    if (use.tensor > 1 && subject.tensor_plan.is_null()) return;
    Layout layout = layout_of(subject, num_ranks, use);
    // A stage has the statistics of its own rank's samples.
    if (!subject.has_batch_norm || layout.data == 1) all.push_back(std::move(layout));
  };
  if (num_ranks == 2) {
    add(2, {.pipeline = 2, .schedule = "zb-h1", .more = {{"balance", "parameters"}}});
    add(2, {.strategy = "SHARD_OPTIMIZER",
            .pipeline = 2,
            .schedule = "gpipe",
            .more = {{"stage_layers", {num_blocks - 1, 1}}}});
  }
  if (num_ranks == 4) {
    add(4, {.pipeline = 4, .schedule = "1f1b"});
    add(4, {.pipeline = 4, .schedule = "zb-h1"});
    add(2, {.pipeline = 2, .schedule = "1f1b"});
    add(2, {.strategy = "SHARD_OPTIMIZER", .pipeline = 2, .schedule = "zb-h1"});
    add(2, {.strategy = "SHARD_GRAD_OP", .pipeline = 2, .schedule = "gpipe"});
    add(4, {.strategy = "SHARD_GRAD_OP", .pipeline = 2, .schedule = "interleaved"});
    add(2, {.strategy = "FULL_SHARD", .pipeline = 2, .schedule = "1f1b"});
    add(4, {.strategy = "FULL_SHARD", .pipeline = 2, .schedule = "zb-v"});
    add(2, {.tensor = 2, .pipeline = 2, .schedule = "1f1b"});
    add(2, {.tensor = 2, .pipeline = 2, .schedule = "zb-h1"});
  }
  if (num_ranks == 8) {
    const auto hybrid = [&](const char* schedule) {
      return Use{
          .strategy = "HYBRID_SHARD", .ranks_per_copy = 2, .pipeline = 2, .schedule = schedule};
    };
    add(2, hybrid("zb-h1"));
    add(4, hybrid("interleaved"));
    add(4, {.strategy = "FULL_SHARD", .pipeline = 4, .schedule = "1f1b"});
    add(2, {.strategy = "SHARD_GRAD_OP", .tensor = 2, .pipeline = 2, .schedule = "gpipe"});
    add(2, {.strategy = "FULL_SHARD", .tensor = 2, .pipeline = 2, .schedule = "zb-h1"});
  }
  return all;
}

EngineConfig config_of(const Subject& subject, const Layout& layout) {
  json config = {
      {"train_batch_size", subject.batch},
      {"train_micro_batch_size_per_gpu",
       subject.micro > 0 ? subject.micro : subject.batch / layout.data},
      {"optimizer", {{"type", "SGD"}, {"params", {{"lr", kRate}, {"momentum", kMomentum}}}}},
      {"gradient_clipping", kClipping},
      {"seed", kSeed},
      {"device", "cpu"},
      {"steps_per_print", 1000},
      {"timeout_seconds", 60}};
  config.update(layout.keys);
  return EngineConfig::from_json(config.dump());
}

std::vector<NamedTensor> train_alone(const Subject& subject, std::int64_t epochs) {
  torch::manual_seed(kSeed);
  const auto model = subject.make();
  // The stream of the first rank.
  torch::manual_seed(hash_text(fmt::format("{}/0", kSeed)));
  torch::optim::SGD sgd(model->parameters(), torch::optim::SGDOptions(kRate).momentum(kMomentum));
  const auto points = std::make_shared<plain::Points>(subject.num_samples);
  data::DataLoader loader(points,
                          data::DistributedSampler({.size = subject.num_samples, .seed = kSeed}),
                          {.batch_size = subject.batch});
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch) {
    loader.set_epoch(epoch);
    while (const auto batch = loader.next()) {
      sgd.zero_grad();
      plain::mean_loss(model->forward(batch->input), batch->target).backward();
      torch::nn::utils::clip_grad_norm_(model->parameters(), kClipping);
      sgd.step();
    }
  }
  std::vector<NamedTensor> state;
  for (const auto& item : model->named_parameters()) state.push_back({item.key(), item.value()});
  for (const auto& item : model->named_buffers()) state.push_back({item.key(), item.value()});
  return state;
}

void expect_same_state(ranks::Cells& cells, const std::vector<NamedTensor>& got,
                       const std::vector<NamedTensor>& wanted, double tolerance) {
  cells.expect(got.size() == wanted.size(), "the number of tensors differs");
  for (const NamedTensor& one : wanted) {
    const auto found = std::ranges::find(got, one.name, &NamedTensor::name);
    if (found == got.end()) {
      cells.expect(false, one.name + " is missing");
      continue;
    }
    const at::Tensor off = (found->tensor - one.tensor).abs().max();
    cells.expect(at::allclose(found->tensor, one.tensor, tolerance, tolerance),
                 fmt::format("{} is off by {:g}", one.name, off.item<double>()));
  }
}

void set_default_type(c10::ScalarType type) {
  at::set_default_dtype(c10::scalarTypeToTypeMeta(type));
}

}  // namespace lockstep
