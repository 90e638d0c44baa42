#include "parity.h"

#include <cmath>
#include <fstream>
#include <map>
#include <numeric>

#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>

#include "../base/files.h"
#include "layouts.h"

namespace lockstep {

using nlohmann::json;
using ranks::Cells;

namespace {

// Eight processes on two cores wait for each other most of the time.
std::int64_t num_epochs(const Cells& cells) { return cells.num_ranks() < 8 ? 2 : 1; }

// Passes beside those of the steps.
void check_no_sync(Cells& cells) {
  set_default_type(at::kDouble);
  Subject subject = subjects().front();
  subject.num_samples = 36;
  const std::vector<NamedTensor> wanted = train_alone(subject, 1);
  for (Layout layout : layouts(subject, cells.num_ranks())) {
    layout.keys["train_batch_size"] = subject.batch / 2;
    cells.cell("every other batch under no_sync(), " + layout.name, [&] {
      auto engine = initialize(config_of(subject, layout), subject.make);
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
}

}  // namespace

void check_engine_parity(Cells& cells) {
  for (const auto& [type, type_name, tolerance] :
       {std::tuple(at::kDouble, "fp64", 1e-9), std::tuple(at::kFloat, "fp32", 1e-5)}) {
    set_default_type(type);
    for (const Subject& subject : subjects()) {
      const std::vector<NamedTensor> wanted = train_alone(subject, num_epochs(cells));
      for (const Layout& layout : layouts(subject, cells.num_ranks()))
        cells.cell(subject.name + ", " + layout.name + ", " + type_name, [&] {
          auto engine = initialize(config_of(subject, layout), subject.make,
                                   {.sync_batchnorm = subject.has_batch_norm});
          train_epochs(engine, subject, num_epochs(cells));
          expect_state(cells, engine, wanted, tolerance);
        });
    }
  }
  if (cells.num_ranks() < 8) check_no_sync(cells);
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
    auto engine = initialize(config_of(subject, layout), subject.make);
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
  const auto train = [&](const json& keys) {
    auto engine = initialize(config_of(subject, {"", keys}), sequential);
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
      const auto alone = train({{"sharding_strategy", strategy}});
      const auto staged = train(
          {{"sharding_strategy", strategy}, {"parallel", {{"pipeline", 2}, {"schedule", "zb-v"}}}});
      cells.expect(alone.size() == staged.size(), "the number of tensors differs");
      for (const auto& [name, tensor] : alone) {
        const at::Tensor off = (staged.at(name) - tensor).abs().max();
        cells.expect(off.item<double>() <= 1e-9,
                     fmt::format("{} is off by {:g}", name, off.item<double>()));
      }
    });
}

void check_shared_and_cut(Cells& cells) {
  cells.cell("a plan that does not fit one stage's layers", [&] {
    Subject subject = subjects().front();
    subject.tensor_plan = {{"third", "column"}};  // 3 outputs
    cells.expect_usage_error(
        [&] { initialize(config_of(subject, last_pipeline(cells, subject)), subject.make); },
        "3 is no multiple of 2");
  });
  cells.cell("a weight that stages share and a tensor axis cuts", [&] {
    Subject subject = subjects().back();
    subject.tensor_plan["tokens"] = "column";
    cells.expect_usage_error(
        [&] { initialize(config_of(subject, last_pipeline(cells, subject)), subject.make); },
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
                  {"", {{"parallel", {{"pipeline", 4}}}, {"zero_optimization", {{"stage", 3}}}}}),
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

Layout two_stages(Cells& cells) {
  return {.name = "",
          .keys = {{"sharding_strategy", "FULL_SHARD"}, {"parallel", {{"pipeline", 2}}}},
          .num_axes = 1,
          .data = cells.num_ranks() / 2};
}

void check_schedule_file(Cells& cells) {
  set_default_type(at::kDouble);
  const Subject subject = subjects().front();
  const testing::TemporaryFolder folder;
  Layout layout = two_stages(cells);
  const auto file = folder / "schedule.json";
  layout.keys["parallel"]["schedule_file"] = file;
  const auto write = [&](int num_micro_batches) {
    pipeline::write_schedule(
        file, pipeline::make_schedule(pipeline::ScheduleKind::zb_h1,
                                      {.num_ranks = 2, .num_micro_batches = num_micro_batches}));
  };
  const auto num_micro_batches = static_cast<int>(subject.batch / subject.micro / layout.data);
  // The last step of an epoch has fewer micro-batches than the file.
  cells.cell("a schedule's file", [&] {
    write(num_micro_batches);
    auto engine = initialize(config_of(subject, layout), subject.make);
    train_epochs(engine, subject, 2);
    expect_state(cells, engine, train_alone(subject, 2), 1e-9);
  });
  cells.cell("a file of another step's schedule", [&] {
    write(num_micro_batches + 1);
    cells.expect_usage_error([&] { initialize(config_of(subject, layout), subject.make); },
                             fmt::format("a schedule of {} micro-batches, and a step of this run "
                                         "has {}",
                                         num_micro_batches + 1, num_micro_batches));
  });
}

constexpr std::int64_t kTokens = 8;

// A sample has several targets.
class Tokens : public plain::Points {
 public:
  using Points::Points;
  data::Batch batch(std::span<const std::int64_t> indices) const override {
    data::Batch batch = Points::batch(indices);
    batch.target = batch.target.unsqueeze(1).repeat({1, kTokens});
    return batch;
  }
};

// The gradients that reach the model's output are those of the mean over a rank's tokens, or
// samples, times the scale; their number is rounded to a power of two.
template <typename LossOf>
void expect_scaled_gradients(Cells& cells, const Subject& subject, const Layout& layout,
                             double count, const LossOf& loss_of) {
  constexpr double kScale = 1024;
  Layout scaled = layout;
  scaled.keys["fp16"]["loss_scale"] = kScale;
  auto engine = initialize(config_of(subject, scaled), subject.make);
  std::vector<double> seen;
  engine.train_batch(engine.loader(std::make_shared<Tokens>(subject.num_samples)),
                     [&](const at::Tensor& output, const at::Tensor& target) {
                       output.register_hook([&](const at::Tensor& gradient) {
                         seen.push_back(gradient.abs().max().item<double>());
                       });
                       return loss_of(output, target);
                     });
  if (layout.keys.contains("parallel")) {
    const auto stages = engine.dist().mesh().axis("pp");
    if (stages->rank() + 1 < stages->size()) return;
  }
  cells.expect(!seen.empty(), "no gradient was seen");
  const double wanted = kScale / std::exp2(std::round(std::log2(count)));
  for (const double gradient : seen)
    cells.expect(gradient == wanted,
                 fmt::format("a gradient of {:g} is off by {:g}", gradient, gradient - wanted));
}

void check_loss_scale(Cells& cells) {
  set_default_type(at::kFloat);
  const Subject subject = subjects().front();
  Layout staged = two_stages(cells);
  staged.keys["fp16"] = {{"enabled", true}};
  Layout whole = staged;
  whole.keys.erase("parallel");
  whole.data = cells.num_ranks();
  for (const Layout& layout : {staged, whole}) {
    const char* how = layout.keys.contains("parallel") ? "in stages" : "whole";
    const double samples = static_cast<double>(subject.batch) / layout.data;
    cells.cell(fmt::format("the loss scale is of the mean over samples, {}", how), [&] {
      expect_scaled_gradients(
          cells, subject, layout, samples,
          [](const at::Tensor& output, const at::Tensor&) { return output.sum(1).mean(); });
    });
    cells.cell(fmt::format("the loss scale is of the mean over tokens, {}", how), [&] {
      expect_scaled_gradients(cells, subject, layout, samples * kTokens,
                              [](const at::Tensor& output, const at::Tensor& target) {
                                return nn::LossSum{output.sum(), target.numel()};
                              });
    });
  }
  const auto trained = [&](const json& fp16, double weight = 1) {
    Layout layout = staged;
    layout.keys["fp16"].update(fp16);
    auto engine = initialize(config_of(subject, layout), subject.make);
    const auto batches = engine.loader(std::make_shared<plain::Points>(subject.num_samples));
    while (engine.epoch() < 2)
      engine.train_batch(batches, [&](const at::Tensor& output, const at::Tensor& target) {
        return weight * plain::mean_loss(output, target);
      });
    return engine;
  };
  cells.cell("a loss scale in stages changes nothing where nothing overflows", [&] {
    auto scaled = trained({{"loss_scale", 1024}}), unscaled = trained({{"loss_scale", 1}});
    cells.expect(scaled.loss_scale() == 1024 && scaled.skipped_steps() == 0, "the scale");
    expect_state(cells, scaled, unscaled.dist().full_state_dict(unscaled.model()), 1e-3);
    expect_state(cells, scaled, train_alone(subject, 2), 1e-2);
  });
  cells.cell("steps of stages that overflow are skipped, and the scale falls", [&] {
    // On a CPU gradients have 32 bits.
    auto engine = trained({{"initial_scale_power", 127}, {"hysteresis", 1}}, 1000);
    const auto skipped = engine.skipped_steps();
    cells.expect(skipped > 0 && skipped < engine.global_steps(),
                 fmt::format("{} of {} steps were skipped", skipped, engine.global_steps()));
    cells.expect(engine.loss_scale() == std::exp2(127 - static_cast<double>(skipped)),
                 "the scale is another one");
    cells.expect(std::isfinite(engine.last_step().loss), "the loss is not finite");
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
      const std::vector<Layout> all = pipelines(subject, cells.num_ranks());
      if (all.empty()) continue;
      const std::vector<NamedTensor> wanted = train_alone(subject, num_epochs(cells));
      for (const Layout& layout : all)
        cells.cell(subject.name + ", " + layout.name + ", " + type_name, [&] {
          auto engine = initialize(config_of(subject, layout), subject.make);
          train_epochs(engine, subject, num_epochs(cells));
          expect_state(cells, engine, wanted, tolerance);
        });
    }
  }
  if (cells.num_ranks() < 8) {
    check_outputs(cells);
    check_sequential(cells);
    check_schedule_file(cells);
    check_loss_scale(cells);
  }
  if (cells.num_ranks() == 4) {
    check_shared_and_cut(cells);
    check_stage_memory(cells);
  }
  set_default_type(at::kFloat);
}

namespace {

// A model whose weights are tied in pipelines, and one that a tensor axis cuts.
Subject resumed_in_stages() { return subjects().back(); }
Subject resumed() { return subjects().front(); }

void save_half(Cells& cells, const Subject& subject, const Layout& layout,
               const std::filesystem::path& folder) {
  cells.cell("half a run is saved, " + layout.name, [&] {
    auto engine = initialize(config_of(subject, layout), subject.make);
    train_epochs(engine, subject, 1);
    // Within the second epoch, too.
    const auto batches = engine.loader(std::make_shared<plain::Points>(subject.num_samples));
    while (engine.global_steps() < 6) engine.train_batch(batches, plain::mean_loss);
    engine.save_checkpoint(folder, "half", {{"note", "by hand"}});
    // To the bit where nothing changes.
    train_epochs(engine, subject, 2);
    auto again = initialize(config_of(subject, layout), subject.make);
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
      auto engine = initialize(config_of(subject, layout), subject.make);
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
