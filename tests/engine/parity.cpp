#include "parity.h"

#include <algorithm>
#include <functional>

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
           .tensor_plan = {{"encoder.layers.*.linear1", "column"},
                           {"encoder.layers.*.linear2", "row"}}},
          {.name = "a GPT",
           .make = make<plain::Gpt>,
           .tensor_plan = {
               {"blocks.*.fc1", "column"}, {"blocks.*.fc2", "row"}, {"blocks.*.out", "row"}}}};
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
  cells.cell("batch norms over ranks of which one has no sample", [&] {
    Subject norms = subjects().at(1);
    norms.num_samples = 37;
    auto engine = engine_of(norms);
    cells.expect_usage_error(
        [&] { (void)engine.loader(std::make_shared<plain::Points>(37)).begin(); },
        "set dataloader_drop_last, or a train_micro_batch_size_per_gpu other than 6");
  });
}

void save_half_a_run(Cells& cells, const std::filesystem::path& folder) {
  set_default_type(at::kDouble);
  const Subject subject = subjects().front();
  const Layout layout = layouts(subject, cells.num_ranks()).at(3);
  cells.cell("half a run is saved", [&] {
    auto engine = initialize(config_of(subject, layout, cells.num_ranks()), subject.make);
    train_epochs(engine, subject, 1);
    // Within the second epoch, too.
    const auto points = std::make_shared<plain::Points>(subject.num_samples);
    for (const auto& batch : engine.loader(points)) {
      engine.backward(plain::mean_loss(engine.forward(batch.data), batch.target));
      engine.step();
      if (engine.global_steps() == 6) break;
    }
    engine.save_checkpoint(folder, "half", {{"note", "by hand"}});
  });
}

void finish_half_a_run(Cells& cells, const std::filesystem::path& folder) {
  set_default_type(at::kDouble);
  const Subject subject = subjects().front();
  const std::vector<NamedTensor> wanted = train_alone(subject, 2);
  for (const Layout& layout : layouts(subject, cells.num_ranks()))
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

}  // namespace lockstep
