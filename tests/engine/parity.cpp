#include "parity.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>

#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <lockstep/base/hash.h>
#include <lockstep/data/data_loader.h>
#include <lockstep/train/engine.h>

#include "plain_models.h"

namespace lockstep {

namespace {

using nlohmann::json;
using ranks::Cells;

constexpr std::uint64_t kSeed = 7;
constexpr double kRate = 0.05, kMomentum = 0.9, kClipping = 0.5;

struct Subject {
  std::string name;
  std::function<std::shared_ptr<plain::Net>()> make;
  std::int64_t num_samples = 41;
  std::int64_t batch = 12;
  std::int64_t micro = 2;  // 0: the whole share of a rank
  bool has_batch_norm = false;
  json tensor_plan = {};  // over two ranks
};

template <typename Model>
std::shared_ptr<plain::Net> make() {
  return std::make_shared<Model>();
}

std::vector<Subject> subjects() {
  return {{.name = "an MLP",
           .make = make<plain::Mlp>,
           .tensor_plan = {{"first", "column"}, {"second", "row"}}},
          // Statistics are those of a whole step only where a step is one pass.
          {.name = "convolutions with batch norm",
           .make = make<plain::ConvNet>,
           .num_samples = 36,
           .micro = 0,
           .has_batch_norm = true},
          {.name = "an LSTM", .make = make<plain::Recurrent>},
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

struct Layout {
  std::string name;
  json keys;
};

std::vector<Layout> layouts(const Subject& subject, int num_ranks) {
  std::vector<Layout> all;
  for (const char* strategy : {"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"})
    all.push_back({strategy, {{"sharding_strategy", strategy}}});
  if (num_ranks % 2 == 0)
    all.push_back({"HYBRID_SHARD",
                   {{"sharding_strategy", "HYBRID_SHARD"}, {"fsdp", {{"ranks_per_copy", 2}}}}});
  if (subject.tensor_plan.is_null() || num_ranks % 2 != 0) return all;
  // Over two ranks of data, too, where there are four.
  for (const char* strategy : {"NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"}) {
    if (num_ranks == 2 && all.back().keys.contains("tensor_plan")) break;
    all.push_back({std::string("tensor 2, ") + strategy,
                   {{"sharding_strategy", strategy},
                    {"parallel", {{"tensor", 2}}},
                    {"tensor_plan", subject.tensor_plan}}});
  }
  return all;
}

// Ranks that have some of the layers each, with several places in the data where there are four.
std::vector<Layout> pipelines(const Subject& subject, int num_ranks) {
  const auto model = subject.make();
  const std::vector<pipeline::ModelBlock> blocks = model->pipeline_blocks();
  const auto num_blocks = static_cast<int>(blocks.size());
  const auto num_trained = std::ranges::count_if(blocks, [](const auto& block) {
    return std::ranges::any_of(block.modules.front()->parameters(),
                               [](const at::Tensor& one) { return one.requires_grad(); });
  });
  std::vector<Layout> all;
  const auto add = [&](int ranks, const char* schedule, int stages, const char* strategy,
                       const json& more = json::object()) {
    if (num_ranks % ranks != 0 || stages > num_trained) return;
    Layout& layout =
        all.emplace_back(Layout{fmt::format("pipeline {}, {}, {}", ranks, schedule, strategy),
                                {{"sharding_strategy", strategy},
                                 {"parallel", {{"pipeline", ranks}, {"schedule", schedule}}}}});
    layout.keys["parallel"].update(more);
  };
  if (num_ranks == 2) {
    add(2, "zb-h1", 2, "NO_SHARD", {{"balance", "parameters"}});
    add(2, "gpipe", 2, "SHARD_OPTIMIZER", {{"stage_layers", {num_blocks - 2, 2}}});
  }
  add(4, "1f1b", 4, "NO_SHARD");
  add(4, "zb-h1", 4, "NO_SHARD");
  if (num_ranks != 4) return all;
  add(2, "1f1b", 2, "NO_SHARD");
  add(2, "zb-h1", 2, "SHARD_OPTIMIZER");
  add(2, "interleaved", 4, "SHARD_GRAD_OP");
  add(2, "1f1b", 2, "FULL_SHARD");
  add(2, "zb-v", 4, "FULL_SHARD");
  if (subject.tensor_plan.is_null()) return all;
  for (const char* schedule : {"1f1b", "zb-h1"}) {
    add(2, schedule, 2, "NO_SHARD", {{"tensor", 2}});
    all.back().name += ", tensor 2";
    all.back().keys["tensor_plan"] = subject.tensor_plan;
  }
  return all;
}

EngineConfig config_of(const Subject& subject, const Layout& layout, int num_ranks) {
  json config = {
      {"train_batch_size", subject.batch},
      {"train_micro_batch_size_per_gpu",
       subject.micro > 0 ? subject.micro : subject.batch / num_ranks},
      {"optimizer", {{"type", "SGD"}, {"params", {{"lr", kRate}, {"momentum", kMomentum}}}}},
      {"gradient_clipping", kClipping},
      {"seed", kSeed},
      {"device", "cpu"},
      {"steps_per_print", 1000},
      {"timeout_seconds", 60}};
  config.update(layout.keys);
  return EngineConfig::from_json(config.dump());
}

// Plain LibTorch: whole batches, one process.
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

template <typename AnEngine>
void train_epochs(AnEngine& engine, const Subject& subject, std::int64_t until) {
  const auto points = std::make_shared<plain::Points>(subject.num_samples);
  if (engine.dist().config().model_parallel.pipeline > 1) {
    const auto batches = engine.loader(points);
    while (engine.epoch() < until) engine.train_batch(batches, plain::mean_loss);
    return;
  }
  while (engine.epoch() < until)
    for (const auto& batch : engine.loader(points)) {
      const at::Tensor loss = plain::mean_loss(engine.forward(batch.data), batch.target);
      engine.backward(loss);
      engine.step();
    }
}

template <typename AnEngine>
void expect_state(Cells& cells, AnEngine& engine, const std::vector<NamedTensor>& wanted,
                  double tolerance) {
  const std::vector<NamedTensor> got = engine.dist().full_state_dict(engine.model());
  if (!engine.dist().is_main()) return;
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

}  // namespace

void check_engine_parity(Cells& cells) {
  for (const auto& [type, type_name, tolerance] :
       {std::tuple(at::kDouble, "fp64", 1e-9), std::tuple(at::kFloat, "fp32", 1e-5)}) {
    set_default_type(type);
    for (const Subject& subject : subjects()) {
      const std::vector<NamedTensor> wanted = train_alone(subject, 2);
      for (const Layout& layout : layouts(subject, cells.num_ranks()))
        cells.cell(subject.name + ", " + layout.name + ", " + type_name, [&] {
          auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make,
                                   {.sync_batchnorm = subject.has_batch_norm});
          train_epochs(engine, subject, 2);
          expect_state(cells, engine, wanted, tolerance);
        });
    }
  }
  set_default_type(at::kDouble);
  Subject subject = subjects().front();
  subject.num_samples = 36;
  const std::vector<NamedTensor> wanted = train_alone(subject, 1);
  for (Layout layout : layouts(subject, cells.num_ranks())) {
    layout.keys["train_batch_size"] = subject.batch / 2;
    cells.cell("every other batch under no_sync(), " + layout.name, [&] {
      auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
      const auto points = std::make_shared<plain::Points>(subject.num_samples);
      const std::int64_t accumulation = engine.gradient_accumulation_steps();
      std::int64_t pass = 0;
      for (const auto& batch : engine.loader(points)) {
        const at::Tensor loss = plain::mean_loss(engine.forward(batch.data), batch.target);
        if (pass++ / accumulation % 2 == 0) {
          const auto local = engine.no_sync();
          engine.backward(loss);
        } else {
          engine.backward(loss);
          engine.step();
        }
      }
      cells.expect(engine.global_steps() == 3, "the number of steps is another one");
      expect_state(cells, engine, wanted, 1e-9);
    });
  }
  set_default_type(at::kFloat);
}

namespace {

Layout last_pipeline(Cells& cells, const Subject& subject) {
  return pipelines(subject, cells.num_ranks()).back();
}

// Losses and outputs without training.
void check_outputs(Cells& cells) {
  set_default_type(at::kDouble);
  const Subject subject = subjects().back();
  const Layout layout = last_pipeline(cells, subject);
  cells.cell("evaluation, " + layout.name, [&] {
    auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
    torch::manual_seed(kSeed);
    const auto whole = subject.make();
    const auto points = std::make_shared<plain::Points>(37);
    std::vector<std::int64_t> all(37);
    std::iota(all.begin(), all.end(), 0);
    const data::Batch batch = points->batch(all);
    const at::Tensor output = whole->forward(batch.input);
    const auto wanted = plain::mean_loss(output, batch.target).item<double>();
    cells.expect(std::abs(engine.evaluate(points, plain::mean_loss) - wanted) < 1e-9,
                 "the loss of a data set");
    for (const Outputs asked : {Outputs::none, Outputs::on_last_stage, Outputs::on_all_ranks}) {
      const EngineEvaluation got =
          engine.eval_batch({batch.input, batch.target}, plain::mean_loss, asked);
      cells.expect(std::abs(got.loss - wanted) < 1e-9, "the loss of a batch");
      cells.expect(got.count == 37.0 * engine.dist().data_size(), "the samples of all ranks");
      const auto stages = engine.dist().mesh().axis("pp");
      const bool has_last = stages->rank() + 1 == stages->size();
      const bool has_output =
          asked == Outputs::on_all_ranks || (asked == Outputs::on_last_stage && has_last);
      cells.expect(got.output.defined() == has_output, "who has the output");
      if (got.output.defined())
        cells.expect(at::allclose(got.output, output, 1e-9, 1e-9), "the output is another one");
    }
    cells.expect(engine.model()->is_training() && engine.global_steps() == 0, "nothing is trained");
  });
}

// A Sequential needs no list of blocks, and a loss may count what it likes.
void check_sequential(Cells& cells) {
  set_default_type(at::kDouble);
  const Subject subject = subjects().front();
  const auto sequential = [] {
    return torch::nn::Sequential(
        torch::nn::Linear(6, 16), torch::nn::Tanh(), torch::nn::Linear(16, 9), torch::nn::Tanh(),
        torch::nn::Linear(9, 7), torch::nn::Tanh(), torch::nn::Linear(7, 3));
  };
  // Of the classes 0 and 1 alone.
  const auto some = [](const at::Tensor& output, const at::Tensor& target) {
    const at::Tensor counts = target.ne(2);
    return nn::LossSum{at::nll_loss(output.log_softmax(1), at::where(counts, target, -100), {},
                                    at::Reduction::Sum, -100),
                       counts.sum().item<std::int64_t>()};
  };
  const auto train = [&](const json& keys, int num_ranks) {
    auto engine = initialize(config_of(subject, {"", keys}, num_ranks), sequential);
    const auto batches = engine.loader(std::make_shared<plain::Points>(subject.num_samples));
    double loss = 0;
    while (engine.epoch() < 2) loss = engine.train_batch(batches, some);
    cells.expect(std::isfinite(loss), "the loss");
    std::map<std::string, at::Tensor> state;
    for (const NamedTensor& one : engine.dist().full_state_dict(engine.model()))
      state.emplace(one.name, one.tensor);
    return state;
  };
  for (const char* strategy : {"NO_SHARD", "FULL_SHARD"})
    cells.cell(std::string("a Sequential, tokens counted, ") + strategy, [&] {
      const auto alone = train({{"sharding_strategy", strategy}}, cells.num_ranks());
      const auto staged = train(
          {{"sharding_strategy", strategy}, {"parallel", {{"pipeline", 2}, {"schedule", "zb-v"}}}},
          cells.num_ranks());
      cells.expect(alone.size() == staged.size(), "the number of tensors differs");
      for (const auto& [name, tensor] : alone) {
        const at::Tensor off = (staged.at(name) - tensor).abs().max();
        cells.expect(off.item<double>() <= 1e-9,
                     fmt::format("{} is off by {:g}", name, off.item<double>()));
      }
    });
}

void check_shared_and_cut(Cells& cells) {
  cells.cell("a weight that stages share and a tensor axis cuts", [&] {
    Subject subject = subjects().back();
    subject.tensor_plan["tokens"] = "column";
    cells.expect_usage_error(
        [&] { initialize(config_of(subject, last_pipeline(cells, subject), 4), subject.make); },
        "'tokens.weight' is shared by stages of the pipeline, and a tensor axis cuts it");
  });
}

// The most memory that this process had since the peak was forgotten, in MiB.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  return 0;
}

// Of four equal stages no rank holds two, from the start.
void check_stage_memory(Cells& cells) {
  set_default_type(at::kFloat);
  constexpr double kWholeMib = 256;
  cells.cell("no rank has the memory of the whole model", [&] {
    std::ofstream("/proc/self/clear_refs") << 5;  // forgets the peak
    const double before = peak_mib();
    const Subject subject{.name = "", .make = {}, .batch = 4, .micro = 1};
    auto engine = initialize(
        config_of(subject,
                  {"", {{"parallel", {{"pipeline", 4}}}, {"zero_optimization", {{"stage", 3}}}}},
                  4),
        [] {
          torch::nn::Sequential layers;
          for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(4096, 4096));
          return layers;
        });
    const double grown = peak_mib() - before;
    cells.expect(grown > kWholeMib / 8 && grown < kWholeMib * 5 / 8,
                 fmt::format("{:.0f} MiB were taken for a stage of {:.0f}", grown, kWholeMib / 4));
  });
}

}  // namespace

void check_engine_pipelines(Cells& cells) {
  for (const auto& [type, type_name, tolerance] :
       {std::tuple(at::kDouble, "fp64", 1e-9), std::tuple(at::kFloat, "fp32", 1e-5)}) {
    set_default_type(type);
    std::vector<Subject> models = subjects();
    models.push_back({.name = "a partly frozen GPT", .make = make<plain::PartlyFrozenGpt>});
    for (const Subject& subject : models) {
      std::vector<Layout> all = pipelines(subject, cells.num_ranks());
      if (all.empty()) continue;
      if (type == at::kFloat) all = {all.front(), all.back()};
      const std::vector<NamedTensor> wanted = train_alone(subject, 2);
      for (const Layout& layout : all)
        cells.cell(subject.name + ", " + layout.name + ", " + type_name, [&] {
          auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
          train_epochs(engine, subject, 2);
          expect_state(cells, engine, wanted, tolerance);
        });
    }
  }
  check_outputs(cells);
  check_sequential(cells);
  if (cells.num_ranks() == 4) {
    check_shared_and_cut(cells);
    check_stage_memory(cells);
  }
  set_default_type(at::kFloat);
}

namespace {

// Its blocks have one weight, under a name each.
struct SharesUnderTwoNames : plain::Net {
  struct Head : torch::nn::Module {
    explicit Head(const at::Tensor& of) : weight(register_parameter("weight", of)) {}
    at::Tensor weight;
  };
  SharesUnderTwoNames() {
    register_module("first", first);
    head = register_module("head", std::make_shared<Head>(first->weight));
  }
  at::Tensor scores(const at::Tensor& x) { return at::matmul(x, head->weight.t()); }
  at::Tensor forward(const at::Tensor& x) override { return scores(at::tanh(first(x))); }
  std::vector<pipeline::ModelBlock> pipeline_blocks() override {
    return {pipeline::block_of({first.ptr()},
                               [this](const at::Tensor& x) { return at::tanh(first(x)); }),
            pipeline::block_of({head}, [this](const at::Tensor& x) { return scores(x); })};
  }
  torch::nn::Linear first{6, 6};
  std::shared_ptr<Head> head;
};

void check_pipeline_mistakes(Cells& cells) {
  const Subject subject = subjects().front();
  const auto engine_of = [&](const Subject& of, const json& more = json::object(),
                             const InitializeOptions& options = {}) {
    json parallel = {{"pipeline", 2}};
    parallel.update(more);
    return initialize(config_of(of, {"", {{"parallel", parallel}}}, 2), of.make, options);
  };
  const auto points = std::make_shared<plain::Points>(9);
  const auto batch_of = [&](std::vector<std::int64_t> samples) {
    const data::Batch batch = points->batch(samples);
    return EngineBatch{batch.input, batch.target};
  };
  cells.cell("calls of the whole model with a pipeline", [&] {
    auto engine = engine_of(subject);
    const EngineBatch batch = batch_of({0, 1});
    cells.expect_usage_error([&] { engine.forward(batch.data); }, "call engine.train_batch(");
    cells.expect_usage_error([&] { engine.autocast(); }, "call engine.train_batch(");
    cells.expect_usage_error([&] { engine.model()->forward(batch.data); }, "engine.train_batch()");
    cells.expect_usage_error([&] { engine.backward(at::ones({}), 1); }, "engine.train_batch(");
    cells.expect_usage_error(
        [&] {
          engine.evaluate(points, [&](const EngineBatch& one) {
            return plain::mean_loss(engine.forward(one.data), one.target);
          });
        },
        "with a loss_of(output, target)");
  });
  cells.cell("more stages than blocks", [&] {
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"schedule", "interleaved"}});
        },
        "is 4 stages, and of the model's 3 blocks 3 have a parameter that is trained");
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"stage_layers", {2, 2}}});
        },
        "[2, 2], which is 4 blocks, and the model has 3");
  });
  cells.cell("a model that lists no blocks", [&] {
    Subject other = subject;
    other.make = make<plain::Recurrent>;
    cells.expect_usage_error([&] { engine_of(other); }, "give it a member pipeline_blocks()");
  });
  cells.cell("a weight that stages know by different names", [&] {
    Subject other = subject;
    other.make = make<SharesUnderTwoNames>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "know as 'first.weight' and as 'head.weight'");
  });
  cells.cell("another model in stages on one rank", [&] {
    Subject other = subject;
    if (cells.rank() == 1) other.make = make<plain::Encoder>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "rank 1 of 'world' was given another pipeline than rank 0");
  });
  cells.cell("batch norms over all ranks with a pipeline", [&] {
    cells.expect_usage_error([&] { engine_of(subject, json::object(), {.sync_batchnorm = true}); },
                             "sync_batchnorm is set");
  });
  cells.cell("batches of the program's own", [&] {
    auto engine = engine_of(subject);
    cells.expect(engine.gradient_accumulation_steps() == 6, "a step has 6 passes");
    std::vector<EngineBatch> batches(5, batch_of({0, 1}));
    cells.expect_usage_error([&] { engine.train_batch(batches, plain::mean_loss); },
                             "5 batches were given, and a step has 6 passes");
    batches.push_back(batch_of({2}));
    const double loss = engine.train_batch(batches, plain::mean_loss);
    cells.expect(engine.last_step().count == 11 && loss == engine.last_step().loss,
                 "the mean over 11 samples");
    if (cells.rank() == 1) batches[0] = batch_of({0, 1, 2});
    cells.expect_usage_error([&] { engine.train_batch(batches, plain::mean_loss); },
                             "were given other batches");
    cells.expect(engine.global_steps() == 1, "a refused step counts");
  });
  cells.cell("a loss that is no number ends the pipeline on all ranks", [&] {
    auto engine = engine_of(subject);
    const auto losses = [](const at::Tensor& output, const at::Tensor&) { return output.sum(1); };
    try {
      engine.train_batch(engine.loader(points), losses);
      cells.expect(false, "nothing was thrown");
    } catch (const Error& error) {
      cells.expect(std::string(error.what()).find("it must be one number") != std::string::npos,
                   error.what());
    }
  });
}

}  // namespace

void check_engine_mistakes(Cells& cells) {
  const Subject subject = subjects().front();
  const auto engine_of = [&](const Subject& of, const json& changes = json::object()) {
    Layout layout{"", {{"sharding_strategy", "FULL_SHARD"}}};
    layout.keys.update(changes);
    return initialize(config_of(of, layout, cells.num_ranks()), of.make,
                      {.sync_batchnorm = of.has_batch_norm});
  };
  cells.cell("sums of the program's own count after a batch that did not", [&] {
    // The last pass of an epoch leaves rank 1 without a sample.
    auto engine = engine_of(subject);
    train_epochs(engine, subject, 1);
    for (std::int64_t pass = 0; pass < engine.gradient_accumulation_steps(); ++pass) {
      const data::Batch batch = plain::Points(9).batch(std::vector<std::int64_t>{1, 2});
      engine.backward(plain::mean_loss(engine.forward(batch.input), batch.target) * 2, 2);
      engine.step();
    }
    const auto wanted =
        static_cast<double>(2 * cells.num_ranks() * engine.gradient_accumulation_steps());
    cells.expect(engine.last_step().count == wanted, "the count is another one");
  });
  cells.cell("a tag that is not there", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error([&] { engine.load_checkpoint("/nowhere", "best"); },
                             "no checkpoint with the tag \"best\"");
  });
  cells.cell("another tag on one rank", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error(
        [&] { engine.save_checkpoint("/nowhere", cells.rank() == 0 ? "a" : "b"); },
        "ranks were told different things");
  });
  cells.cell("a checkpoint that cannot be written", [&] {
    auto engine = engine_of(subject);
    cells.expect_usage_error([&] { engine.save_checkpoint("/proc/nowhere"); },
                             "the checkpoint of step 0 could not be written");
  });
  cells.cell("data of another size on one rank", [&] {
    auto engine = engine_of(subject);
    const auto points = std::make_shared<plain::Points>(20 + cells.rank());
    cells.expect_usage_error([&] { (void)engine.loader(points).begin(); },
                             "the data set has 21 samples");
    cells.expect_usage_error(
        [&] {
          engine.evaluate(points, [&](const EngineBatch& batch) {
            return plain::mean_loss(engine.forward(batch.data), batch.target);
          });
        },
        "the data set has 21 samples");
  });
  cells.cell("another config on one rank", [&] {
    cells.expect_usage_error(
        [&] {
          engine_of(subject, {{"gradient_clipping", cells.rank()}});
        },
        "gradient_clipping is 1");
  });
  cells.cell("another model on one rank", [&] {
    Subject other = subject;
    if (cells.rank() == 1) other.make = make<plain::Recurrent>;
    cells.expect_usage_error([&] { engine_of(other); },
                             "the model of rank 1 differs from that of rank 0");
  });
  cells.cell("dropout over a tensor axis is that of one process", [&] {
    const Subject dropout{.name = "dropout",
                          .make = make<plain::MlpWithDropout>,
                          .num_samples = 36,
                          .micro = 12,
                          .tensor_plan = subject.tensor_plan};
    const std::vector<NamedTensor> wanted = train_alone(dropout, 2);
    auto engine = initialize(config_of(dropout, layouts(dropout, 2).back(), 2), dropout.make);
    train_epochs(engine, dropout, 2);
    expect_state(cells, engine, wanted, 1e-5);
  });
  check_pipeline_mistakes(cells);
  cells.cell("batch norms over ranks of which one has no sample", [&] {
    Subject norms = subjects().at(1);
    norms.num_samples = 37;
    auto engine = engine_of(norms);
    cells.expect_usage_error(
        [&] { (void)engine.loader(std::make_shared<plain::Points>(37)).begin(); },
        "set dataloader_drop_last, or a train_micro_batch_size_per_gpu other than 6");
  });
}

namespace {

// A model whose weights are tied in pipelines, and one that a tensor axis cuts.
Subject resumed_in_stages() { return subjects().back(); }
Subject resumed() { return subjects().front(); }

void save_half(Cells& cells, const Subject& subject, const Layout& layout,
               const std::filesystem::path& folder) {
  cells.cell("half a run is saved, " + layout.name, [&] {
    auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
    train_epochs(engine, subject, 1);
    // Within the second epoch, too.
    const auto batches = engine.loader(std::make_shared<plain::Points>(subject.num_samples));
    while (engine.global_steps() < 6) engine.train_batch(batches, plain::mean_loss);
    engine.save_checkpoint(folder, "half", {{"note", "by hand"}});
    // To the bit where nothing changes.
    train_epochs(engine, subject, 2);
    auto again = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
    again.load_checkpoint(folder);
    train_epochs(again, subject, 2);
    expect_state(cells, again, engine.dist().full_state_dict(engine.model()), 0);
  });
}

void finish_half(Cells& cells, const Subject& subject, const std::vector<Layout>& layouts,
                 const std::filesystem::path& folder) {
  const std::vector<NamedTensor> wanted = train_alone(subject, 2);
  for (const Layout& layout : layouts)
    cells.cell("the other half, " + layout.name, [&] {
      auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
      const auto loaded = engine.load_checkpoint(folder);
      cells.expect(
          loaded && loaded->global_step == 6 && loaded->client_state.at("note") == "by hand",
          "the checkpoint is not the one that was saved");
      train_epochs(engine, subject, 2);
      cells.expect(engine.global_steps() == 8, "the number of steps is another one");
      expect_state(cells, engine, wanted, 1e-9);
    });
}

}  // namespace

void save_half_a_run(Cells& cells, const std::filesystem::path& folder) {
  set_default_type(at::kDouble);
  save_half(cells, resumed(), layouts(resumed(), cells.num_ranks()).at(3), folder / "whole");
  save_half(cells, resumed_in_stages(), pipelines(resumed_in_stages(), cells.num_ranks()).back(),
            folder / "stages");
}

void finish_half_a_run(Cells& cells, const std::filesystem::path& folder) {
  set_default_type(at::kDouble);
  finish_half(cells, resumed(), layouts(resumed(), cells.num_ranks()), folder / "whole");
  std::vector<Layout> in_stages = pipelines(resumed_in_stages(), cells.num_ranks());
  in_stages.push_back(layouts(resumed_in_stages(), cells.num_ranks()).at(3));
  finish_half(cells, resumed_in_stages(), in_stages, folder / "stages");
}

}  // namespace lockstep
