// A user's model that lists its blocks, over the ranks of a pipeline.
#include <cmath>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/pipeline.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/split_model.h>

#include "executor.h"

namespace lockstep::pipeline {

namespace {

namespace nn = torch::nn;

using Tensors = std::vector<at::Tensor>;

constexpr int kMicroBatches = 5;
constexpr int kLayers = 8;
constexpr int kWidth = 8;
constexpr int kWords = 11;

struct LayerImpl : nn::Module {
  LayerImpl() : norm(nn::LayerNormOptions({kWidth})), up(kWidth, 16), down(16, kWidth) {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }

  at::Tensor forward(const at::Tensor& x) {
    return x + down->forward(at::gelu(up->forward(norm->forward(x))));
  }

  nn::LayerNorm norm;
  nn::Linear up, down;
};
TORCH_MODULE(Layer);

// The shape of a transformer: two tables in front, layers in a list, and a norm and the first
// table's weight behind them; and a parameter of the model itself and a module that every layer
// uses.
struct ReaderImpl : nn::Module {
  ReaderImpl()
      : tokens(kWords, kWidth),
        positions(6, kWidth),
        bias(1, kWidth),
        norm(nn::LayerNormOptions({kWidth})) {
    register_module("tokens", tokens);
    register_module("positions", positions);
    register_module("layers", layers);
    for (int i = 0; i < kLayers; ++i) layers->push_back(Layer());
    register_module("bias", bias);
    register_module("norm", norm);
    scale = register_parameter("scale", at::ones({kWidth}));
  }

  at::Tensor embed(const at::Tensor& words) {
    return tokens->forward(words) + positions->forward(at::arange(words.size(1)));
  }
  at::Tensor layer(std::size_t i, const at::Tensor& x) {
    return layers->ptr<LayerImpl>(i)->forward(x * scale) + bias->weight[0];
  }
  at::Tensor logits(const at::Tensor& x) { return norm->forward(x).matmul(tokens->weight.t()); }

  nn::Embedding tokens, positions, bias;
  nn::ModuleList layers;
  nn::LayerNorm norm;
  at::Tensor scale;
};
TORCH_MODULE(Reader);

const std::set<std::string> kShared = {"tokens.weight", "bias.weight", "scale"};

Reader reader() {
  torch::manual_seed(3);
  return Reader();
}

at::Tensor words_of(int micro_batch) {
  return at::remainder(at::arange(12).view({2, 6}) * (3 + micro_batch), kWords);
}

at::Tensor loss_of(int micro_batch, const at::Tensor& logits) {
  return at::cross_entropy_loss(logits.view({-1, kWords}),
                                (words_of(micro_batch).view(-1) + 1) % kWords, {},
                                at::Reduction::Sum);
}

ListedModel listed(Reader model) {
  ListedModel listed{.model = model.ptr(), .blocks = {}, .input = {}, .loss = {}};
  listed.blocks.push_back(
      {{model->tokens.ptr(), model->positions.ptr()},
       [=](const Tensors& x) mutable -> Tensors { return {model->embed(x[0])}; }});
  for (std::size_t i = 0; i < kLayers; ++i)
    listed.blocks.push_back({{model->layers->ptr(i)}, [=](const Tensors& x) mutable -> Tensors {
                               return {model->layer(i, x[0])};
                             }});
  listed.blocks.push_back(
      {{model->norm.ptr(), model->tokens.ptr()},
       [=](const Tensors& x) mutable -> Tensors { return {model->logits(x[0])}; }});
  listed.input = [](int micro_batch) -> Tensors { return {words_of(micro_batch)}; };
  listed.loss = [](int micro_batch, const Tensors& x) { return loss_of(micro_batch, x.at(0)); };
  return listed;
}

// Runs every block in turn, in one process.
double whole_step_of(const ListedModel& model) {
  double sum = 0;
  for (int i = 0; i < kMicroBatches; ++i) {
    Tensors x = model.input(i);
    for (const ModelBlock& block : model.blocks) x = block.forward(x);
    const at::Tensor loss = model.loss(i, x);
    sum += loss.item<double>();
    loss.backward();
  }
  return sum;
}

Schedule schedule_for(ranks::Cells& cells, ScheduleKind kind) {
  return make_schedule(kind, {.num_ranks = cells.num_ranks(), .num_micro_batches = kMicroBatches});
}

// Compares the model that is cut with its twin that is not: each rank's parameters, and that all
// ranks together have all of them.
void expect_parts_of(ranks::Cells& cells, const nn::Module& model, const nn::Module& whole) {
  const auto all = whole.named_parameters();
  at::Tensor found = at::zeros({static_cast<std::int64_t>(all.size())}, at::kLong);
  for (const auto& item : model.named_parameters()) {
    const at::Tensor* twin = all.find(item.key());
    cells.expect(twin != nullptr, item.key() + " is no name of the whole");
    if (twin == nullptr) continue;
    cells.expect(item.value().sizes() == twin->sizes(), item.key() + " has another shape");
    for (std::size_t i = 0; i < all.size(); ++i)
      if (all[i].key() == item.key()) found[static_cast<std::int64_t>(i)] = 1;
  }
  cells.expect(model.named_parameters().size() < all.size(), "a rank has all of them");
  cells.group()->all_reduce(found).wait();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto times = found[static_cast<std::int64_t>(i)].item<std::int64_t>();
    cells.expect(times == 1 || (times > 1 && kShared.contains(all[i].key())),
                 fmt::format("{} is on {} ranks", all[i].key(), times));
  }
}

void expect_gradients_of(ranks::Cells& cells, const nn::Module& model, const nn::Module& whole) {
  const auto wanted = whole.named_parameters();
  for (const auto& item : model.named_parameters())
    if (kShared.contains(item.key()))
      cells.expect_close(item.value().grad(), wanted[item.key()].grad(), item.key());
    else
      cells.expect_same(item.value().grad(), wanted[item.key()].grad(), item.key());
}

void check_model(ranks::Cells& cells, ScheduleKind kind, const BlockCut& cut) {
  const Schedule schedule = schedule_for(cells, kind);
  Reader model = reader(), whole = reader();
  const ListedModel twin = listed(whole);
  const auto parts = split_model(listed(model), schedule.rank_of_stage, *cells.group(), cut);
  expect_parts_of(cells, *model, *whole);
  std::ostringstream file;
  cells.expect_usage_error([&] { torch::save(model, file); },
                           fmt::format("in stages on {} ranks", cells.num_ranks()));
  Pipeline pipeline(schedule, parts.mine, cells.group(), {.tied = parts.tied});
  for (int step = 0; step < 2; ++step) {
    const double wanted = whole_step_of(twin);
    const double loss = pipeline.run_step();
    cells.expect(std::abs(loss / wanted - 1) < 1e-6, fmt::format("loss {} not {}", loss, wanted));
    expect_gradients_of(cells, *model, *whole);
  }
}

// Has neither a front nor a head, passes pairs between blocks, and keeps its modules in a
// std::vector.
struct StackImpl : nn::Module {
  StackImpl() {
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(4, 4)));
  }
  std::vector<nn::Linear> layers;
};
TORCH_MODULE(Stack);

ListedModel listed_stack(Stack model, bool in_pairs) {
  torch::manual_seed(1);
  ListedModel listed{
      .model = model.ptr(), .blocks = blocks_of(model->layers), .input = {}, .loss = {}};
  if (in_pairs)
    for (ModelBlock& block : listed.blocks)
      block.forward = [one = block.forward](const Tensors& x) -> Tensors {
        return {one({x[0] * x[1]})[0], x[1]};
      };
  listed.input = [=](int micro_batch) -> Tensors {
    const at::Tensor x = at::arange(12, at::kFloat).view({3, 4}) / (7 + micro_batch);
    return in_pairs ? Tensors{x, x.gt(0.3)} : Tensors{x};
  };
  listed.loss = [](int, const Tensors& x) { return x.at(0).square().sum(); };
  return listed;
}

Stack stack() {
  torch::manual_seed(4);
  return Stack();
}

// The tables are in a module of their own, and the head uses one of them; no block lists the norm.
struct NestedImpl : nn::Module {
  struct Front : nn::Module {
    Front() : tokens(kWords, kWidth), positions(6, kWidth) {
      register_module("tokens", tokens);
      register_module("positions", positions);
    }
    nn::Embedding tokens, positions;
  };

  explicit NestedImpl(bool with_scale) : norm(kWidth) {
    register_module("front", front);
    for (int i = 0; i < kLayers; ++i) layers->push_back(Layer());
    register_module("layers", layers);
    register_module("norm", norm);
    if (with_scale) front->register_parameter("scale", at::ones({kWidth}));
  }

  std::shared_ptr<Front> front = std::make_shared<Front>();
  nn::ModuleList layers;
  nn::BatchNorm1d norm;
};
TORCH_MODULE(Nested);

Nested nested(bool with_scale = false) {
  torch::manual_seed(6);
  return Nested(with_scale);
}

ListedModel listed_nested(Nested model) {
  ListedModel listed{.model = model.ptr(), .blocks = {}, .input = {}, .loss = {}};
  listed.blocks.push_back({{model->front}, [=](const Tensors& x) mutable -> Tensors {
                             return {model->front->tokens->forward(x[0]) +
                                     model->front->positions->forward(at::arange(x[0].size(1)))};
                           }});
  for (std::size_t i = 0; i < kLayers; ++i)
    listed.blocks.push_back({{model->layers->ptr(i)}, [=](const Tensors& x) mutable -> Tensors {
                               const at::Tensor rows = x[0].view({-1, kWidth});
                               return {model->layers->ptr<LayerImpl>(i)->forward(
                                   model->norm->forward(rows).view(x[0].sizes()))};
                             }});
  listed.blocks.push_back({{model->front->tokens.ptr()}, [=](const Tensors& x) -> Tensors {
                             return {x[0].matmul(model->front->tokens->weight.t())};
                           }});
  listed.input = [](int micro_batch) -> Tensors { return {words_of(micro_batch)}; };
  listed.loss = [](int micro_batch, const Tensors& x) { return loss_of(micro_batch, x.at(0)); };
  return listed;
}

void check_parts_of_modules(ranks::Cells& cells) {
  const std::vector<int> in_turn = schedule_for(cells, ScheduleKind::gpipe).rank_of_stage;
  cells.cell("a part of another block's module", [&] {
    Nested model = nested(), whole = nested();
    // A batch norm learns in each forward; eval() keeps its statistics alike on all ranks.
    model->norm->eval();
    whole->norm->eval();
    const Schedule schedule = schedule_for(cells, ScheduleKind::gpipe);
    const auto parts = split_model(listed_nested(model), in_turn, *cells.group());
    const bool first = cells.rank() == 0, last = cells.rank() == cells.num_ranks() - 1;
    const auto names = model->named_parameters();
    cells.expect(names.contains("front.positions.weight") == first, "the positions' names");
    cells.expect(names.contains("front.tokens.weight") == (first || last), "the tokens' names");
    Pipeline pipeline(schedule, parts.mine, cells.group(), {.tied = parts.tied});
    const double wanted = whole_step_of(listed_nested(whole));
    cells.expect(std::abs(pipeline.run_step() / wanted - 1) < 1e-6, "the loss is wrong");
    for (const auto& item : names)
      cells.expect_close(item.value().grad(), whole->named_parameters()[item.key()].grad(),
                         item.key());
  });
  cells.cell("a part of a module with parameters of its own", [&] {
    cells.expect_usage_error(
        [&] { split_model(listed_nested(nested(true)), in_turn, *cells.group()); },
        "has 'front.tokens', and another block 'front', which that is a part of");
  });
  cells.cell("the model itself as a block's module", [&] {
    Nested model = nested(), whole = nested();
    ListedModel all = listed_nested(model);
    for (ModelBlock& block : all.blocks) block.modules = {model.ptr()};
    split_model(all, in_turn, *cells.group());
    cells.expect(model->named_parameters().size() == whole->named_parameters().size(),
                 "a rank that has all of it lost some");
  });
  cells.cell("measured time changes nothing", [&] {
    Nested model = nested();
    const at::Tensor mean = model->norm->running_mean.clone();
    ListedModel drawn = listed_nested(model);
    drawn.input = [](int) -> Tensors { return {at::randint(kWords, {2, 6}, at::kLong)}; };
    torch::manual_seed(9);
    const at::Tensor next = at::rand({3});
    torch::manual_seed(9);
    split_model(drawn, in_turn, *cells.group(), {.balance = Balance::time});
    cells.expect_same(model->norm->running_mean, mean, "the running mean");
    cells.expect_same(at::rand({3}), next, "the next random numbers");
  });
}

void check_shapes_of_models(ranks::Cells& cells) {
  for (const bool in_pairs : {false, true})
    cells.cell(fmt::format("a vector of blocks alone, {}", in_pairs ? "pairs" : "one tensor"), [&] {
      Stack model = stack(), whole = stack();
      const Schedule schedule = schedule_for(cells, ScheduleKind::interleaved);
      const auto parts =
          split_model(listed_stack(model, in_pairs), schedule.rank_of_stage, *cells.group());
      expect_parts_of(cells, *model, *whole);
      Pipeline pipeline(schedule, parts.mine, cells.group(), {.tied = parts.tied});
      const double wanted = whole_step_of(listed_stack(whole, in_pairs));
      cells.expect(std::abs(pipeline.run_step() / wanted - 1) < 1e-6, "the loss is wrong");
      expect_gradients_of(cells, *model, *whole);
    });
  cells.cell("a ModuleList", [&] {
    const Reader model = reader();
    const auto blocks = blocks_of<Layer>(*model->layers);
    cells.expect(blocks.size() == kLayers, "blocks are missing");
    const at::Tensor x = at::ones({2, kWidth});
    cells.expect_same(blocks[3].forward({x}).at(0), model->layers->ptr<LayerImpl>(3)->forward(x),
                      "block 3");
    cells.expect_usage_error([&] { blocks_of<nn::Linear>(*model->layers); },
                             "block 0 of the list is a");
  });
}

void check_cuts_of_models(ranks::Cells& cells) {
  const int ranks = cells.num_ranks();
  const std::vector<int>& in_turn = schedule_for(cells, ScheduleKind::gpipe).rank_of_stage;
  cells.cell("an embedding that weighs more", [&] {
    Reader model = reader();
    ListedModel heavy = listed(model);
    nn::Embedding large = model->register_module("large", nn::Embedding(1000, kWidth));
    heavy.blocks[0].modules.push_back(large.ptr());
    cells.expect(split_model(heavy, in_turn, *cells.group()).cuts[1] == 1, "it is not alone");
  });
  cells.cell("cut where it is said, and ranks without it have no memory for it", [&] {
    Cuts cuts = {0};
    for (int i = 1; i < ranks; ++i) cuts.push_back(kLayers + 2 - ranks + i);
    cuts.push_back(kLayers + 2);
    Reader model = reader();
    const at::Tensor last = model->norm->weight;
    cells.expect(split_model(listed(model), in_turn, *cells.group(), {.cuts = cuts}).cuts == cuts,
                 "it is cut elsewhere");
    const bool mine = cells.rank() == ranks - 1;
    cells.expect(last.numel() == (mine ? kWidth : 0), "the head is somewhere else");
    cells.expect(model->named_parameters().contains("norm.weight") == mine, "the head's names");
  });
  cells.cell("weights of other seeds: what is shared is the first holder's", [&] {
    torch::manual_seed(cells.rank());
    Reader model;
    at::Tensor wanted = model->tokens->weight.detach().clone();
    cells.group()->broadcast(wanted, 0).wait();
    split_model(listed(model), in_turn, *cells.group());
    for (const auto& item : model->named_parameters())
      if (item.key() == "tokens.weight") cells.expect_same(item.value(), wanted, item.key());
  });
}

void check_mistakes_of_models(ranks::Cells& cells) {
  const int ranks = cells.num_ranks();
  const bool other = cells.rank() == ranks - 1;
  const auto refused = [&](const ListedModel& model, const std::string& part, int stages_a_rank = 1,
                           const BlockCut& cut = {}) {
    std::vector<int> rank_of_stage;
    for (int i = 0; i < ranks * stages_a_rank; ++i) rank_of_stage.push_back(i % ranks);
    cells.expect_usage_error([&] { split_model(model, rank_of_stage, *cells.group(), cut); }, part);
  };
  cells.cell("what cannot be cut, and ranks that disagree", [&] {
    const Reader model = reader();
    const ListedModel good = listed(model);
    refused(good, fmt::format("10 blocks cannot be cut into {} stages", 6 * ranks), 6);
    refused(good, "does not cut 10 blocks", 1, {.cuts = {0, 3}});
    ListedModel bad = good;
    if (other) bad.model = nullptr;
    refused(bad, "has no model");
    bad = good;
    if (other) bad.input = nullptr;
    refused(bad, "has no input");
    bad = good;
    if (other) bad.loss = nullptr;
    refused(bad, "has no loss");
    bad = good;
    bad.blocks[2].forward = nullptr;
    refused(bad, "block 2 of the model has no forward");
    bad = good;
    bad.blocks[1].modules.push_back(nn::Linear(2, 2).ptr());
    refused(bad,
            "block 1 of the model has a module (torch::nn::LinearImpl) that is not registered");
    bad = good;
    if (other) std::swap(bad.blocks[1], bad.blocks[2]);
    refused(bad, fmt::format("rank {} of", ranks - 1));
    refused(bad, "'layers.1' ");
    bad = good;
    if (other) bad.blocks.pop_back();
    refused(bad, fmt::format("rank {} of", ranks - 1));
    // Nothing was freed, and the model can still be cut correctly.
    cells.expect(model->norm->weight.numel() == kWidth, "something was freed");
    split_model(good, schedule_for(cells, ScheduleKind::gpipe).rank_of_stage, *cells.group());
  });
}

}  // namespace

void check_listed(ranks::Cells& cells) {
  for (const ScheduleKind kind : schedule_kinds())
    cells.cell(fmt::format("a model that lists its blocks, {}", name_of(kind)),
               [&] { check_model(cells, kind, {}); });
  cells.cell("balanced by time", [&] {
    check_model(cells, ScheduleKind::one_forward_one_backward, {.balance = Balance::time});
  });
  check_parts_of_modules(cells);
  check_shapes_of_models(cells);
  check_cuts_of_models(cells);
  check_mistakes_of_models(cells);
}

}  // namespace lockstep::pipeline
