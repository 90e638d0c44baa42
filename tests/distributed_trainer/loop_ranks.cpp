// What a trainer does beside fit(), on every number of ranks and with every strategy, against one
// process: epochs, evaluation, prediction, checkpoints, averaged weights, and when it stops.
#include <algorithm>
#include <cmath>

#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <nlohmann/json.hpp>

#include <lockstep/data/data_loader.h>
#include <lockstep/train/distributed_trainer.h>

#include "line.h"
#include "ranks.h"

namespace lockstep {

using nlohmann::json;

namespace {

constexpr double kRate = 0.05, kDecay = 0.8;
constexpr std::int64_t kSamples = 17, kBatch = 6;

struct TwoLayersImpl : torch::nn::Module {
  TwoLayersImpl() {
    torch::manual_seed(5);
    first = register_module("first", torch::nn::Linear(2, 5));
    second = register_module("second", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& input) { return second->forward(first->forward(input)); }
  std::vector<pipeline::ModelBlock> pipeline_blocks() {
    return {pipeline::block_of(first), pipeline::block_of(second)};
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoLayers);

const auto kLoss = [](const at::Tensor& output, const at::Tensor& target) {
  return squares(output.narrow(1, 0, 1), target).mean();
};

// Of all samples, [samples, 1].
at::Tensor targets() {
  std::vector<float> all;
  for (int k = 0; k < kSamples; ++k) all.push_back(3 * static_cast<float>(k) / 10 - 2);
  return at::tensor(all).unsqueeze(1);
}

// One process, in plain LibTorch.
struct Alone {
  TwoLayers net;
  std::vector<at::Tensor> averages;
  std::int64_t epoch = 0;
  double loss = 0;  // the last epoch's mean

  Alone() {
    for (const at::Tensor& weight : net->parameters()) averages.push_back(weight.detach().clone());
  }

  void train_epoch() {
    const auto all = data::from_torch(Line(kSamples));
    data::DataLoader loader(all, data::DistributedSampler({.size = kSamples}),
                            {.batch_size = kBatch});
    loader.set_epoch(epoch++);
    loss = 0;
    while (const auto batch = loader.next()) {
      net->zero_grad();
      const at::Tensor mean = kLoss(net->forward(batch->input), batch->target);
      mean.backward();
      loss += mean.item<double>() * static_cast<double>(batch->size()) / kSamples;
      const c10::NoGradGuard no_grad;
      std::size_t i = 0;
      for (at::Tensor& weight : net->parameters()) {
        weight -= kRate * weight.grad();
        averages[i] = kDecay * averages[i] + (1 - kDecay) * weight;
        ++i;
      }
    }
  }

  at::Tensor outputs() {
    std::vector<std::int64_t> all(kSamples);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
    const c10::NoGradGuard no_grad;
    return net->forward(data::from_torch(Line(kSamples))->batch(all).input).detach();
  }

  // The same with the averages.
  at::Tensor averaged_outputs() {
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> kept;
    std::size_t i = 0;
    for (at::Tensor& weight : net->parameters()) {
      kept.push_back(weight.detach().clone());
      weight.copy_(averages[i++]);
    }
    const at::Tensor given = outputs();
    i = 0;
    for (at::Tensor& weight : net->parameters()) weight.copy_(kept[i++]);
    return given;
  }

  double loss_of(const at::Tensor& outputs) const {
    return kLoss(outputs, targets()).item<double>();
  }
};

TrainerOptions options(const DistributedManager& dist) {
  const int passes = dist.config().model_parallel.pipeline;
  const std::int64_t together = passes * dist.data_size();
  return {.epochs = 2,
          .batch_size = (kBatch + together - 1) / together,
          .samples_per_step = kBatch,
          .optimizer = optim::SGDOptions{},
          .learning_rate = kRate,
          .ema_decay = kDecay,
          .progress_fd = -1};
}

auto trainer_of(const DistributedManager& dist, const TrainerOptions& options) {
  return DistributedTrainer(
      dist, [] { return TwoLayers(); }, kLoss, options);
}

void expect_near(ranks::Cells& cells, double got, double wanted, const char* what) {
  cells.expect(std::abs(got - wanted) < 1e-5, fmt::format("{} is {}, not {}", what, got, wanted));
}

void check_a_strategy(const DistributedManager& dist, const std::filesystem::path& folder,
                      ranks::Cells& cells, const std::string& name) {
  cells.cell(name + ": epochs, evaluation and prediction", [&] {
    Alone alone;
    auto trainer = trainer_of(dist, options(dist));
    trainer.add_metric("last", [](const at::Tensor& output, const at::Tensor& target) {
      return (output.select(1, 2) + target.squeeze(1)).sum();
    });
    for (int epoch = 1; epoch <= 2; ++epoch) {
      alone.train_epoch();
      const EpochEnd end = trainer.train_epoch(Line(kSamples));
      cells.expect(end.epoch == epoch && end.steps == 3 && end.step == 3 * epoch,
                   fmt::format("epoch {} ended at step {}", end.epoch, end.step));
      expect_near(cells, end.loss, alone.loss, "the epoch's loss");
    }
    const Validation validation = trainer.evaluate(Line(kSamples));
    expect_near(cells, validation.loss, alone.loss_of(alone.outputs()), "the loss");
    expect_near(cells, validation.metrics.at(0).value,
                (alone.outputs().select(1, 2) + targets().squeeze(1)).mean().item<double>(),
                "the metric");
    expect_near(cells, trainer.evaluate(Line(kSamples), Weights::averaged).loss,
                alone.loss_of(alone.averaged_outputs()), "the averaged weights' loss");
    const at::Tensor main = trainer.predict(Line(kSamples));
    cells.expect(main.defined() == dist.is_main(), "outputs are on the wrong rank");
    if (main.defined()) cells.expect_close(main, alone.outputs(), "the outputs");
    cells.expect_close(trainer.predict(Line(kSamples), {.on_all_ranks = true}), alone.outputs(),
                       "the outputs on all ranks");
    cells.expect_close(
        trainer.predict(Line(kSamples), {.weights = Weights::averaged, .on_all_ranks = true}),
        alone.averaged_outputs(), "the averaged weights' outputs");
    // Fewer samples than ranks, and of another type.
    const at::Tensor classes = trainer.predict(
        Line(1), [](const at::Tensor& output) { return output.argmax(1); }, {.on_all_ranks = true});
    cells.expect_same(classes, alone.outputs().narrow(0, 0, 1).argmax(1), "the class");
    cells.expect(trainer.model()->is_training(), "the model is left in eval mode");
    cells.expect_usage_error(
        [&] {
          trainer.predict(Line(kSamples), [](const at::Tensor& output) { return output.sum(); });
        },
        "it must have one row for each");
  });
  cells.cell(name + ": a checkpoint", [&] {
    auto trainer = trainer_of(dist, options(dist));
    std::int64_t steps = 0;
    // Within the second epoch.
    trainer.on_step([&](const StepEnd&) { return ++steps == 4 ? Then::stop : Then::go_on; });
    trainer.train_epoch(Line(kSamples));
    cells.expect(trainer.train_epoch(Line(kSamples)).step == 4, "it did not stop at step 4");
    trainer.save_checkpoint(folder / name);
    auto other = trainer_of(dist, options(dist));
    other.load_checkpoint(folder / name);
    const TrainingResult result = other.fit(Line(kSamples));
    cells.expect(result.resumed_after == 4 && result.step == 6,
                 fmt::format("it went on from {} to {}", result.resumed_after, result.step));
    Alone alone;
    alone.train_epoch();
    alone.train_epoch();
    cells.expect_close(other.predict(Line(kSamples), {.on_all_ranks = true}), alone.outputs(),
                       "the outputs");
    cells.expect_close(
        other.predict(Line(kSamples), {.weights = Weights::averaged, .on_all_ranks = true}),
        alone.averaged_outputs(), "the averaged weights' outputs");
  });
}

// What a config says of a pipeline, and what cannot be cut into one.
void check_pipelines(ranks::Cells& cells, const std::filesystem::path& folder) {
  cells.cell("DeepSpeedTrainer in a pipeline", [&] {
    const auto config = EngineConfig::from_json(R"({
      "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2,
      "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
      "parallel": {"pipeline": 2, "schedule": "zb-h1"}, "seed": 0, "device": "cpu",
      "gradient_clipping": 0})");
    // Counts by itself: each sample twice.
    const auto doubled = [](const at::Tensor& output, const at::Tensor& target) {
      return nn::LossSum{.sum = 2 * kLoss(output, target) * target.size(0),
                         .count = 2 * target.size(0)};
    };
    DeepSpeedTrainer trainer([] { return TwoLayers(); }, doubled, config,
                             {.epochs = 2, .progress_fd = -1});
    const TrainingResult result = trainer.fit(Line(kSamples), Line(kSamples));
    Alone alone;
    alone.train_epoch();
    alone.train_epoch();
    expect_near(cells, *result.validation_loss, alone.loss_of(alone.outputs()), "the loss");
    std::int64_t held = 0;
    for (const at::Tensor& weight : trainer.model()->parameters()) held += weight.numel();
    cells.expect(held == (cells.rank() == 0 ? 15 : 18), fmt::format("it holds {} numbers", held));
    trainer.save_checkpoint(folder / "stages");
    auto whole = trainer_of(
        setup_distributed({.device_type = c10::DeviceType::CPU}),
        {.epochs = 2, .batch_size = 3, .optimizer = optim::SGDOptions{}, .progress_fd = -1});
    whole.load_checkpoint(folder / "stages");
    cells.expect_close(whole.predict(Line(kSamples), {.on_all_ranks = true}), alone.outputs(),
                       "the outputs of the whole model");
  });
  auto dist = setup_distributed({.mode = ParallelMode::HYBRID,
                                 .model_parallel = {.pipeline = 2},
                                 .timeout = milliseconds(60'000),
                                 .device_type = c10::DeviceType::CPU});
  cells.cell("models that are no pipeline", [&] {
    cells.expect_usage_error([&] { DistributedTrainer(dist, TwoLayers(), kLoss, {.epochs = 1}); },
                             "give it a function that makes the model");
    cells.expect_usage_error(
        [&] {
          DistributedTrainer(dist, [] { return torch::nn::Linear(2, 3); }, kLoss, {.epochs = 1});
        },
        "does not say which blocks its stages are made of");
    cells.expect_usage_error(
        [&] {
          DistributedTrainer(dist, [] { return torch::nn::Sequential(torch::nn::Linear(2, 3)); },
                             kLoss, {.epochs = 1});
        },
        "needs");
    cells.expect_usage_error(
        [&] {
          DistributedTrainer(dist,
                             [&] {
                               torch::nn::Sequential net(torch::nn::Linear(2, 4),
                                                         torch::nn::BatchNorm1d(4),
                                                         torch::nn::Linear(4, 1));
                               dist.convert_sync_batchnorm(net);
                               return net;
                             },
                             kLoss, {.epochs = 1});
        },
        "batch norm of the model was synchronised");
    DistributedTrainer sums(
        dist,
        [] {
          return torch::nn::Sequential(
              torch::nn::Linear(2, 4), torch::nn::Linear(4, 1),
              torch::nn::Functional([](const at::Tensor& x) { return x.sum(); }));
        },
        [](const at::Tensor& output, const at::Tensor&) { return output; }, options(dist));
    // The last stage says it, and ends the wait of the others.
    std::string said;
    try {
      sums.predict(Line(kSamples));
    } catch (const Error& error) {
      said = error.what();
    }
    cells.expect(said.find("it must have a row for each") != std::string::npos, said);
  });
}

// A config names the batch of all ranks, or that of each.
void check_batches_of_configs(ranks::Cells& cells) {
  const int num_ranks = cells.num_ranks();
  const auto train = [&](const json& batch, std::int64_t steps) {
    json config = {{"optimizer", {{"type", "SGD"}, {"params", {{"lr", kRate}}}}},
                   {"gradient_clipping", 0},
                   {"zero_optimization", {{"stage", 2}}},
                   {"seed", TrainerOptions().seed},
                   {"device", "cpu"},
                   {"timeout_seconds", 60}};
    config.update(batch);
    std::int64_t largest = 0;
    const auto loss = [&](const at::Tensor& output, const at::Tensor& target) {
      largest = std::max(largest, target.size(0));
      return kLoss(output, target);
    };
    DeepSpeedTrainer trainer([] { return TwoLayers(); }, loss,
                             EngineConfig::from_json(config.dump()),
                             {.epochs = 2, .progress_fd = -1});
    const TrainingResult result = trainer.fit(Line(kSamples));
    cells.expect(result.step == steps, fmt::format("{} steps were taken", result.step));
    const auto micro = batch.at("train_micro_batch_size_per_gpu").get<std::int64_t>();
    cells.expect(largest == std::min(micro, (kSamples + num_ranks - 1) / num_ranks),
                 fmt::format("a pass had {} samples", largest));
    return trainer.predict(Line(kSamples), {.on_all_ranks = true});
  };
  cells.cell("DeepSpeedTrainer: the batch of all ranks", [&] {
    Alone alone;
    alone.train_epoch();
    alone.train_epoch();
    const at::Tensor outputs =
        train({{"train_batch_size", kBatch}, {"train_micro_batch_size_per_gpu", 2}}, 6);
    cells.expect_close(outputs, alone.outputs(), "the outputs");
  });
  cells.cell("DeepSpeedTrainer: the batch of each rank", [&] {
    const std::int64_t of_all = 2 * 2 * num_ranks;
    train({{"train_micro_batch_size_per_gpu", 2}, {"gradient_accumulation_steps", 2}},
          2 * ((kSamples + of_all - 1) / of_all));
  });
}

}  // namespace

void check_loops(ranks::Cells& cells, const std::filesystem::path& folder) {
  const milliseconds timeout(60'000);
  std::vector<std::pair<std::string, DistributedConfig>> all = {
      {"DDP", {.timeout = timeout}},
      {"SHARD_OPTIMIZER",
       {.mode = ParallelMode::FSDP,
        .sharding_strategy = ShardingStrategy::SHARD_OPTIMIZER,
        .timeout = timeout}},
      {"SHARD_GRAD_OP",
       {.mode = ParallelMode::FSDP,
        .sharding_strategy = ShardingStrategy::SHARD_GRAD_OP,
        .timeout = timeout}},
      {"FULL_SHARD",
       {.mode = ParallelMode::FSDP,
        .sharding_strategy = ShardingStrategy::FULL_SHARD,
        .timeout = timeout}}};
  if (cells.num_ranks() == 2)
    all.push_back({"HYBRID_SHARD",
                   {.mode = ParallelMode::FSDP,
                    .sharding_strategy = ShardingStrategy::HYBRID_SHARD,
                    .mesh = {{"dp_replicate", 1}, {"dp_shard", 2}},
                    .timeout = timeout}});
  if (cells.num_ranks() == 4) all.clear();
  if (cells.num_ranks() % 2 == 0)
    for (const ShardingStrategy strategy :
         {ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER,
          ShardingStrategy::FULL_SHARD})
      all.push_back({fmt::format("a pipeline with {}", name_of(strategy)),
                     {.mode = ParallelMode::HYBRID,
                      .sharding_strategy = strategy,
                      .model_parallel = {.pipeline = 2},
                      .timeout = timeout}});
  for (auto& [name, config] : all) {
    config.device_type = c10::DeviceType::CPU;
    check_a_strategy(setup_distributed(config), folder, cells, name);
  }
  if (cells.num_ranks() == 2) check_pipelines(cells, folder);
  if (cells.num_ranks() < 4) check_batches_of_configs(cells);
  const auto dist = setup_distributed(all.front().second);
  cells.cell("one rank's callback stops all", [&] {
    auto trainer = trainer_of(dist, options(dist));
    const int last = cells.num_ranks() - 1;
    trainer.on_step([&](const StepEnd& step) {
      return cells.rank() == last && step.step == 2 ? Then::stop : Then::go_on;
    });
    const TrainingResult result = trainer.fit(Line(kSamples));
    cells.expect(result.end == TrainingResult::End::stopped && result.step == 2,
                 fmt::format("it ended at step {}", result.step));
  });
}

// Takes the averaged weights of a run on other ranks.
void check_resharded(ranks::Cells& cells, const std::filesystem::path& folder) {
  Alone alone;
  alone.train_epoch();
  alone.train_epoch();
  for (const char* strategy : {"DDP", "FULL_SHARD"})
    cells.cell(std::string("a checkpoint of other ranks, ") + strategy, [&] {
      const auto dist = setup_distributed(
          {.mode = strategy == std::string("DDP") ? ParallelMode::DDP : ParallelMode::FSDP,
           .timeout = milliseconds(60'000),
           .device_type = c10::DeviceType::CPU});
      for (const char* saved : {"DDP", "SHARD_GRAD_OP", "FULL_SHARD"}) {
        auto trainer = trainer_of(dist, options(dist));
        trainer.load_checkpoint(folder / saved);
        trainer.fit(Line(kSamples));
        cells.expect_close(
            trainer.predict(Line(kSamples), {.weights = Weights::averaged, .on_all_ranks = true}),
            alone.averaged_outputs(), "the averaged weights' outputs");
      }
    });
}

}  // namespace lockstep
