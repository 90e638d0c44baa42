#include "script_model.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <lockstep/checkpoint/format/folder.h>
#include <lockstep/distributed/distributed.h>
#include <lockstep/recompute/recompute.h>
#include <lockstep/recovery/checkpointer.h>
#include <lockstep/train/engine.h>

#include "../distributed/same_state.h"

namespace lockstep {

namespace {

using ranks::Cells;
using Script = torch::jit::Module;

constexpr std::int64_t kWide = 8, kBatch = 3;
constexpr double kTolerance = 1e-9;

Script class_of(const std::string& name, const Script& model) {
  return Script(c10::QualifiedName("__torch__." + name), model._ivalue()->compilation_unit(),
                /*shouldMangle=*/true);
}

void add_parameter(Script& module, const std::string& name, const at::Tensor& value,
                   bool trained = true) {
  module.register_parameter(name, value.requires_grad_(trained), /*is_buffer=*/false);
}

at::Tensor drawn(at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble).mul_(0.3); }

Script block_of(const Script& model) {
  Script block = class_of("Block", model);
  block.register_attribute("training", c10::BoolType::get(), true);
  add_parameter(block, "weight", drawn({kWide, kWide}));
  add_parameter(block, "bias", drawn({kWide}));
  block.define(R"(
    def forward(self, x):
        hidden = torch.tanh(torch.linear(x, self.weight, self.bias))
        return x + torch.dropout(hidden, 0.2, self.training)
  )");
  return block;
}

Script norm_of(const Script& model) {
  Script norm = class_of("BatchNorm1d", model);
  norm.register_attribute("training", c10::BoolType::get(), true);
  add_parameter(norm, "weight", at::ones({kWide}, at::kDouble));
  add_parameter(norm, "bias", at::zeros({kWide}, at::kDouble));
  norm.register_buffer("running_mean", at::zeros({kWide}, at::kDouble));
  norm.register_buffer("running_var", at::ones({kWide}, at::kDouble));
  norm.register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  norm.define(R"(
    def forward(self, x):
        if self.training:
            self.num_batches_tracked = self.num_batches_tracked + 1
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var,
                                self.training, 0.1, 1e-5, False)
  )");
  return norm;
}

// Blocks in a list, a batch norm that gives its count another tensor, a weight that is used twice,
// one that is frozen, and one that every second step does without.
Script net(std::uint64_t seed) {
  torch::manual_seed(seed);
  Script model("__torch__.Net");
  model.register_attribute("training", c10::BoolType::get(), true);
  Script blocks = class_of("ModuleList", model);
  for (const char* name : {"0", "1", "2"}) blocks.register_module(name, block_of(model));
  model.register_module("blocks", blocks);
  model.register_module("norm", norm_of(model));
  const at::Tensor shared = drawn({kWide, kWide});
  add_parameter(model, "table", shared);
  add_parameter(model, "head", shared);
  add_parameter(model, "frozen", drawn({kWide}), false);
  add_parameter(model, "seldom", drawn({kWide}));
  model.define(R"(
    def forward(self, x, all_of_it: bool):
        x = torch.matmul(x, self.table) * self.frozen
        x = getattr(self.blocks, "0").forward(x)
        x = getattr(self.blocks, "1").forward(x)
        x = self.norm.forward(x)
        x = getattr(self.blocks, "2").forward(x)
        if all_of_it:
            x = x * torch.sigmoid(self.seldom)
        return torch.matmul(x, self.head), x.detach()

    def shorter(self, x):
        return getattr(self.blocks, "0").forward(x)
  )");
  return model;
}

at::Tensor input_of(int step, int rank) {
  torch::manual_seed(static_cast<std::uint64_t>(100 * step + rank));
  return at::randn({kBatch, kWide}, at::kDouble);
}

at::Tensor loss_of(const c10::IValue& result) {
  return result.toTupleRef().elements()[0].toTensor().square().sum();
}

std::vector<NamedTensor> tensors_of(const Script& script) {
  std::vector<NamedTensor> tensors;
  for (const auto& item : script.named_parameters()) tensors.push_back({item.name, item.value});
  for (const auto& item : script.named_buffers()) tensors.push_back({item.name, item.value});
  return tensors;
}

// One process without us, on the batches of all ranks. The buffers are those of rank 0's batches.
class Whole {
 public:
  Whole() : adamw_(optim::make_optimizer(optim::AdamWOptions{}, groups())) {}

  const Script& script() const { return script_; }
  void step(int number, int num_ranks) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    std::vector<at::Tensor> before, of_first;
    for (const at::Tensor& buffer : script_.buffers()) before.push_back(buffer.clone());
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rank > 0) set_buffers(before);
      const at::Tensor input = input_of(number, rank);
      loss = loss + loss_of(script_.forward({input, number % 2 == 0}));
      if (rank == 0)
        for (const at::Tensor& buffer : script_.buffers()) of_first.push_back(buffer.clone());
    }
    set_buffers(of_first);
    (loss / static_cast<double>(kBatch * num_ranks)).backward();
    adamw_->step(0.05);
    adamw_->zero_grad();
  }

 private:
  std::vector<optim::ParameterGroup> groups() {
    std::vector<NamedTensor> trained;
    for (const auto& item : script_.named_parameters())
      if (item.value.requires_grad() && item.name != "head")  // which is the table
        trained.push_back({item.name, item.value});
    return optim::decay_groups(trained, 0.1);
  }
  void set_buffers(const std::vector<at::Tensor>& values) {
    std::size_t next = 0;
    for (const auto& item : script_.named_modules())
      for (const auto& buffer : item.value.named_buffers(/*recurse=*/false))
        Script(item.value).setattr(buffer.name, values[next++].clone());
  }

  Script script_ = net(3);
  std::unique_ptr<optim::Optimizer> adamw_;
};

void expect_within(Cells& cells, const at::Tensor& got, const at::Tensor& wanted,
                   const std::string& what) {
  const double error = (got - wanted).abs().max().item<double>();
  const double scale = std::max(wanted.abs().max().item<double>(), 1e-3);
  cells.expect(error <= kTolerance * scale, fmt::format("{} is off by {}", what, error));
}

void expect_same_as(Cells& cells, DistributedManager& dist, const ModelRef& model,
                    const Script& whole) {
  const auto state = dist.full_state_dict(model, kEveryRank);
  const auto wanted = tensors_of(whole);
  cells.expect(state.size() == wanted.size(),
               fmt::format("{} tensors, and {} in the script", state.size(), wanted.size()));
  for (const auto& [name, tensor] : wanted) {
    const auto found =
        std::ranges::find_if(state, [&](const NamedTensor& one) { return one.name == name; });
    if (found == state.end())
      cells.expect(false, name + " is missing");
    else
      expect_within(cells, found->tensor, tensor.detach(), name);
  }
}

struct Kind {
  ShardingStrategy strategy;
  std::vector<mesh::Axis> mesh = {};
};

DistributedManager job(const Kind& kind) {
  return setup_distributed({.mode = ParallelMode::FSDP,
                            .sharding_strategy = kind.strategy,
                            .mesh = kind.mesh,
                            .timeout = milliseconds(30'000),
                            .device_type = c10::DeviceType::CPU,
                            .fsdp = {.max_live_units = 1, .scrub_freed_memory = true}});
}

std::vector<Kind> kinds(int num_ranks) {
  using enum ShardingStrategy;
  std::vector<Kind> all = {{NO_SHARD}, {SHARD_OPTIMIZER}, {SHARD_GRAD_OP}, {FULL_SHARD}};
  if (num_ranks == 4) all.push_back({HYBRID_SHARD, {{"dp_replicate", 2}, {"dp_shard", 2}}});
  return all;
}

void train_step(DistributedManager& dist, ScriptModule& model, optim::Optimizer& adamw, int step) {
  const at::Tensor input = input_of(step, dist.rank());
  dist.backward(model, loss_of(model->call({input, step % 2 == 0})), kBatch);
  adamw.step(0.05);
  adamw.zero_grad();
}

// Five steps: TorchScript's own executor would have specialised its code by then.
constexpr int kSteps = 5;

void check_trained(Cells& cells, const Kind& kind) {
  DistributedManager dist = job(kind);
  Whole whole;
  const Script script = net(3 + static_cast<std::uint64_t>(dist.rank()));
  ScriptModule model = dist.wrap_model(script);
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
  for (int step = 0; step < kSteps; ++step) {
    train_step(dist, model, *adamw, step);
    whole.step(step, dist.world_size());
  }
  expect_same_as(cells, dist, model, whole.script());

  // The modes of parts are the script's.
  model->eval();
  cells.expect(!script.is_training() && !script.attr("norm").toModule().is_training(),
               "the script trains after eval()");
  whole.script().attr("norm").toModule().train(false);
  Script(whole.script()).eval();
  {
    const c10::NoGradGuard no_grad;
    const at::Tensor input = input_of(9, 0);
    expect_within(
        cells, model->call({input, true}).toTupleRef().elements()[0].toTensor(),
        Script(whole.script()).forward({input, true}).toTupleRef().elements()[0].toTensor(),
        "what it evaluates to");
  }
  model->train();
  cells.expect(script.attr("norm").toModule().is_training(), "the norm does not train");

  // What is saved for use elsewhere has all of it.
  std::stringstream file;
  {
    const auto whole_here = dist.full_parameters(model);
    script.save(file);
  }
  const Script loaded = torch::jit::load(file);
  const auto wanted = tensors_of(whole.script()), got = tensors_of(loaded);
  cells.expect(got.size() == wanted.size(), "tensors are missing in the file");
  for (std::size_t i = 0; i < std::min(got.size(), wanted.size()); ++i)
    expect_within(cells, got[i].tensor.detach(), wanted[i].tensor.detach(),
                  wanted[i].name + " in the file");
}

// Whatever number of ranks it was saved by.
void check_checkpoints(Cells& cells, const std::filesystem::path& folder) {
  // Another cut of other pieces in each size of job.
  DistributedManager dist = job(
      {cells.num_ranks() == 4 ? ShardingStrategy::SHARD_GRAD_OP : ShardingStrategy::FULL_SHARD});
  for (const int before : {1, 2, 4}) {
    const std::filesystem::path from = folder / std::to_string(before);
    if (!std::filesystem::exists(from) || before == cells.num_ranks()) continue;
    ScriptModule model = dist.wrap_model(net(8));
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
    load_checkpoint(dist, checkpoint::newest_checkpoint(from).value().path, model, *adamw);
    Whole whole;
    for (int step = 0; step < 3; ++step) whole.step(step, before);
    expect_same_as(cells, dist, model, whole.script());
    train_step(dist, model, *adamw, 3);
    whole.step(3, dist.world_size());
    expect_same_as(cells, dist, model, whole.script());
  }
  ScriptModule model = dist.wrap_model(net(3));
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
  for (int step = 0; step < 3; ++step) train_step(dist, model, *adamw, step);
  Checkpointer checkpoints(dist, folder / std::to_string(cells.num_ranks()));
  const SaveResult saved =
      checkpoints.save_and_wait({.tensors = state_of(dist, model, *adamw), .state = {.step = 3}});
  cells.expect(saved.ok(), saved.error);
}

// A script within a module in C++, which recomputes a part of it.
struct Mixed : torch::nn::Module {
  Mixed() {
    torch::manual_seed(5);
    const Script model("__torch__.Mixed");
    first = register_module("first", ScriptModule(block_of(model)));
    rest = register_module("rest", torch::nn::Sequential(torch::nn::Linear(kWide, kWide),
                                                         ScriptModule(norm_of(model))));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = recomputes ? recompute(first.ptr(), x) : first->forward(x);
    return recomputes ? recompute(rest.ptr(), hidden) : rest->forward(hidden);
  }

  ScriptModule first{nullptr};
  torch::nn::Sequential rest{nullptr};
  bool recomputes = false;
};

void check_mixed(Cells& cells, const Kind& kind) {
  DistributedManager dist = job(kind);
  std::vector<std::vector<NamedTensor>> states;
  for (const bool recomputes : {false, true}) {
    const auto model = dist.wrap_model(std::make_shared<Mixed>());
    model->recomputes = recomputes;
    const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{}, 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor input = input_of(step, dist.rank());
      dist.backward(model, model->forward(input).square().sum(), kBatch);
      adamw->step(0.05);
      adamw->zero_grad();
    }
    states.push_back(dist.full_state_dict(model, kEveryRank));
  }
  expect_same_state(cells, states[1], states[0]);
}

void check_tensors(Cells& cells, const Kind& kind) {
  DistributedManager dist = job(kind);
  const auto drawn_with = [](int seed) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    return std::vector{drawn({kWide, kWide}).requires_grad_(), drawn({kWide}).requires_grad_(),
                       drawn({kWide}), drawn({kWide})};
  };
  const auto output_of = [](const std::vector<at::Tensor>& w, const at::Tensor& x) {
    return at::tanh(at::matmul(x, w[0]) * w[1] + w[2]) + w[3];
  };
  const auto whole = drawn_with(3), mine = drawn_with(3 + dist.rank());
  const auto model = dist.wrap_parameters(
      {{"blocks.0.weight", mine[0]}, {"blocks.1.scale", mine[1]}, {"frozen", mine[2]}},
      {{"shift", mine[3]}});
  const auto adamw = dist.make_optimizer(model, optim::AdamWOptions{});
  const auto of_whole = optim::make_optimizer(
      optim::AdamWOptions{}, optim::decay_groups({{"a", whole[0]}, {"b", whole[1]}}, 0));
  for (int step = 0; step < 3; ++step) {
    dist.backward(model, output_of(mine, input_of(step, dist.rank())).square().sum(), kBatch);
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int rank = 0; rank < dist.world_size(); ++rank)
      loss = loss + output_of(whole, input_of(step, rank)).square().sum();
    (loss / static_cast<double>(kBatch * dist.world_size())).backward();
    for (auto* const one : {adamw.get(), of_whole.get()}) {
      one->step(0.05);
      one->zero_grad();
    }
  }
  const auto state = dist.full_state_dict(model, kEveryRank);
  const std::vector<std::string> names = {"frozen", "blocks.0.weight", "blocks.1.scale", "shift"};
  const std::vector<at::Tensor> wanted = {whole[2], whole[0], whole[1], whole[3]};
  cells.expect(state.size() == names.size(), "tensors are missing");
  for (std::size_t i = 0; i < std::min(state.size(), names.size()); ++i) {
    cells.expect(state[i].name == names[i], state[i].name + " is not " + names[i]);
    expect_within(cells, state[i].tensor, wanted[i].detach(), names[i]);
  }
  if (kind.strategy == ShardingStrategy::FULL_SHARD)
    cells.expect(dist.describe(model).find("blocks.1") != std::string::npos,
                 "no unit for a numbered module: " + dist.describe(model));
}

void check_refused(Cells& cells) {
  DistributedManager dist = job({ShardingStrategy::FULL_SHARD});
  const Script script = net(3);
  {
    ScriptModule model = dist.wrap_model(script);
    cells.expect_usage_error([&] { ScriptModule again = dist.wrap_model(script); },
                             "wrapped already");
    std::stringstream file;
    if (dist.world_size() > 1)
      cells.expect_usage_error([&] { script.save(file); }, "full_parameters()");
  }
  cells.expect_usage_error([&] { dist.convert_sync_batchnorm(ScriptModule(net(3))); },
                           "batch norm");
  cells.expect_usage_error([&] { ScriptModule model = dist.wrap_model(Script("__torch__.Empty")); },
                           "has no parameters");

  Script swaps("__torch__.Swaps");
  add_parameter(swaps, "weight", drawn({kWide}));
  swaps.register_buffer("mask", drawn({kWide}));
  swaps.define(R"(
    def forward(self, x):
        return x * self.weight, x
    def swap(self):
        self.weight = self.weight * 2
    def widen(self):
        self.mask = torch.cat([self.mask, self.mask])
  )");
  ScriptModule model = dist.wrap_model(swaps);
  cells.expect_usage_error([&] { model->forward(input_of(0, 0)); }, "call({inputs...})");
  cells.expect_usage_error([&] { model->call({}, "swap"); }, "'weight' another tensor");
}

void check_refused_tensors(Cells& cells) {
  DistributedManager dist = job({ShardingStrategy::FULL_SHARD});
  const at::Tensor one = drawn({2}).requires_grad_();
  const auto refused = [&](const std::vector<NamedTensor>& parameters, const std::string& part) {
    cells.expect_usage_error([&] { const auto model = dist.wrap_parameters(parameters); }, part);
  };
  refused({{"a", one}, {"a", drawn({2})}}, "two tensors of the name 'a'");
  refused({{"", one}}, "the name ''");
  refused({{"a..b", one}}, "the name 'a..b'");
  refused({{"a.", one}}, "the name 'a.'");
  refused({{"a", at::Tensor()}}, "no tensor for 'a'");
  refused({{"a", one * 2}}, "computed from other tensors");
  refused({}, "no parameters and no buffers");
}

// Large enough to be made without memory.
Script large() {
  torch::manual_seed(4);
  Script model("__torch__.Large");
  add_parameter(model, "up", drawn({kWide, 4000}));
  add_parameter(model, "down", drawn({4000, kWide}));
  model.define(R"(
    def forward(self, x):
        return torch.matmul(torch.tanh(torch.matmul(x, self.up)), self.down)
  )");
  return model;
}

// The same however the model was made.
void check_made(Cells& cells, const std::string& folder) {
  const std::string file = fmt::format("{}/large-{}.pt", folder, cells.rank());
  large().save(file);
  std::vector<std::vector<NamedTensor>> states;
  for (const bool cut : {false, true}) {
    const auto engine_of = [&](const auto& make) {
      auto engine = initialize(EngineConfig::from_json(fmt::format(
                                   R"({{"train_micro_batch_size_per_gpu": 3, "device": "cpu",
                   "optimizer": {{"type": "AdamW", "params": {{"lr": 0.01}}}},
                   "zero_optimization": {{"stage": {}}}}})",
                                   cut ? 3 : 0)),
                               make);
      for (int step = 0; step < 3; ++step) {
        engine.backward(engine.forward(input_of(step, cells.rank())).square().sum(), kBatch);
        engine.step();
      }
      states.push_back(engine.dist().full_state_dict(engine.model(), kEveryRank));
    };
    engine_of([&] { return ScriptModule(torch::jit::load(file)); });
    engine_of([&, script = torch::jit::load(file)] { return ScriptModule(script); });
    engine_of([&] { return ScriptModule(large()); });
  }
  cells.expect(states[0].size() == 2 && states[0][0].name == "up", "other names");
  for (const auto& state : states) expect_same_state(cells, state, states[0]);
}

// An owner's error comes out of a script as it went in.
void check_errors_stay(Cells& cells) {
  std::optional<DistributedManager> dist = job({ShardingStrategy::FULL_SHARD});
  ScriptModule model = dist->wrap_model(net(3));
  dist.reset();
  if (cells.num_ranks() > 1)
    cells.expect_usage_error([&] { model->call({input_of(0, 0), true}); }, "");
}

// Against a script of its own that the same file gives, which TorchScript runs by itself.
void check_exported(Cells& cells, const std::string& file, const Kind& kind) {
  DistributedManager dist = job(kind);
  Script whole = torch::jit::load(file);
  ScriptModule model = dist.wrap_model(torch::jit::load(file));
  std::vector<NamedTensor> trained;
  for (const auto& item : model->named_parameters())
    if (item.value().requires_grad())
      for (const auto& own : whole.named_parameters())
        if (own.name == item.key()) trained.push_back({own.name, own.value});
  std::erase_if(trained, [](const NamedTensor& one) { return one.name == "head.weight"; });
  const auto sgd = dist.make_optimizer(model, optim::SGDOptions{});
  const auto of_whole = optim::make_optimizer(optim::SGDOptions{}, optim::decay_groups(trained, 0));
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor mine = input_of(step, dist.rank());
    dist.backward(model, model->forward(mine).square().sum(), kBatch);
    at::Tensor loss = at::zeros({}, at::kDouble);
    std::vector<at::Tensor> before;
    for (const at::Tensor& buffer : whole.buffers()) before.push_back(buffer.clone());
    const auto set_buffers = [&](const std::vector<at::Tensor>& values) {
      std::size_t next = 0;
      for (at::Tensor buffer : whole.buffers()) buffer.set_data(values[next++].clone());
    };
    std::vector<at::Tensor> of_first;
    for (int rank = 0; rank < dist.world_size(); ++rank) {
      if (rank > 0) set_buffers(before);
      const at::Tensor input = input_of(step, rank);
      loss = loss + whole.forward({input}).toTensor().square().sum();
      if (rank == 0)
        for (const at::Tensor& buffer : whole.buffers()) of_first.push_back(buffer.clone());
    }
    set_buffers(of_first);
    (loss / static_cast<double>(kBatch * dist.world_size())).backward();
    for (auto* const one : {sgd.get(), of_whole.get()}) {
      one->step(0.01);
      one->zero_grad();
    }
  }
  const auto state = dist.full_state_dict(model, kEveryRank);
  const auto wanted = tensors_of(whole);
  cells.expect(state.size() == wanted.size(), "tensors are missing");
  for (const auto& [name, tensor] : wanted)
    for (const NamedTensor& one : state)
      if (one.name == name) expect_within(cells, one.tensor, tensor.detach(), name);
}

}  // namespace

void check_exported_model(const std::string& file, Cells& cells) {
  for (const Kind& kind : kinds(cells.num_ranks()))
    cells.cell(fmt::format("{} with {}", file, name_of(kind.strategy)),
               [&] { check_exported(cells, file, kind); });
}

void check_script_model(const std::string& folder, Cells& cells) {
  for (const Kind& kind : kinds(cells.num_ranks())) {
    const auto cell = [&](const char* what, void (*check)(Cells&, const Kind&)) {
      cells.cell(fmt::format("{}, {}", what, name_of(kind.strategy)), [&] { check(cells, kind); });
    };
    cell("a model from TorchScript", check_trained);
    cell("in a module in C++", check_mixed);
    cell("tensors without a module", check_tensors);
  }
  cells.cell("checkpoints of other jobs", [&] { check_checkpoints(cells, folder); });
  cells.cell("in engines, with any factory", [&] { check_made(cells, folder); });
  cells.cell("what is refused", [&] { check_refused(cells); });
  cells.cell("tensors that are refused", [&] { check_refused_tensors(cells); });
  cells.cell("errors of owners", [&] { check_errors_stay(cells); });
}

}  // namespace lockstep
