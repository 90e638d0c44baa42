#include "ranks.h"

#include <cmath>

#include <torch/nn/modules/batchnorm.h>

#include <lockstep/train/distributed_trainer.h>
#include <lockstep/train/main_rank.h>

#include "line.h"

namespace lockstep {

namespace {

TrainerOptions options(double learning_rate, LearningRateScaling scaling) {
  return {.epochs = 1,
          .batch_size = 7,
          .shuffle = false,
          .optimizer = optim::SGDOptions{},
          .learning_rate = learning_rate,
          .learning_rate_scaling = scaling,
          .progress_fd = -1};
}

at::Tensor trained(const DistributedManager& dist, const TrainerOptions& options) {
  DistributedTrainer trainer(dist, Net(), kMean, options);
  trainer.fit(Line(15));
  return trainer.model()->layer->weight.detach().cpu();
}

// Trains in one process with a plain loop: 14 samples, and then the one that is left.
at::Tensor trained_plainly(double learning_rate) {
  const auto all = data::from_torch(Line(15));
  std::vector<std::int64_t> first(14);
  for (std::size_t i = 0; i < first.size(); ++i) first[i] = static_cast<std::int64_t>(i);
  Net net;
  for (const std::vector<std::int64_t>& samples : {first, std::vector<std::int64_t>{14}}) {
    const data::Batch batch = all->batch(samples);
    net->zero_grad();
    kMean(net->forward(batch.input), batch.target).backward();
    const c10::NoGradGuard no_grad;
    net->layer->weight -= learning_rate * net->layer->weight.grad();
  }
  return net->layer->weight.detach();
}

struct Normed : NetImpl {
  Normed() { register_module("norm", norm); }
  at::Tensor forward(const at::Tensor& input) { return NetImpl::forward(norm->forward(input)); }
  torch::nn::BatchNorm1d norm{2};
};

}  // namespace

void check_two_ranks(const DistributedManager& dist, ranks::Cells& cells) {
  // One rank has 7 samples and then 1; the other has 7 and then none.
  cells.cell("uneven shares", [&] {
    cells.expect_close(trained(dist, options(0.1, LearningRateScaling::none)), trained_plainly(0.1),
                       "the weight");
  });
  cells.cell("learning rate by ranks", [&] {
    cells.expect_close(trained(dist, options(0.1, LearningRateScaling::linear)),
                       trained_plainly(0.2), "the weight");
    cells.expect_close(trained(dist, options(0.1, LearningRateScaling::square_root)),
                       trained_plainly(0.1 * std::sqrt(2)), "the weight");
  });
  cells.cell("metrics over all ranks", [&] {
    DistributedTrainer trainer(dist, Net(), kMean, options(0, LearningRateScaling::none));
    trainer.add_metric("first_input", [](const at::Tensor& output, const at::Tensor& target) {
      return (target + 2).sum() / 3 + 0 * output.sum();
    });
    const auto result = trainer.fit(Line(15), Line(15));
    cells.expect(std::abs(result.validation_metrics.at(0).value - 0.7) < 1e-6,
                 fmt::format("the mean is {}", result.validation_metrics.at(0).value));
  });
  cells.cell("ranks that are told different things", [&] {
    const bool odd = dist.rank() == 1;
    TrainerOptions told = options(odd ? 0.2 : 0.1, LearningRateScaling::none);
    cells.expect_usage_error([&] { trained(dist, told); },
                             "rank 1: learning_rate is 0.2; the learning rate of step 0 is 0.2");
    told = options(0.1, LearningRateScaling::none);
    if (odd) told.schedule = optim::WarmupLR{};
    cells.expect_usage_error([&] { trained(dist, told); },
                             "rank 0: the learning rate of step 0 is 0.1; ");
    told = options(0.1, LearningRateScaling::none);
    told.loss_scale = optim::LossScaleOptions{.initial_scale_power = odd ? 10 : 16};
    cells.expect_usage_error([&] { trained(dist, told); }, "rank 1: loss_scale is 2^10 at first");
    told = options(0.1, LearningRateScaling::none);
    DistributedTrainer trainer(dist, Net(), kMean, told);
    cells.expect_usage_error([&] { trainer.fit(Line(odd ? 15 : 16)); },
                             "rank 0: the training set has 16 samples\n");
    cells.expect_usage_error(
        [&] {
          setup_distributed({.mode = odd ? ParallelMode::FSDP : ParallelMode::DDP,
                             .timeout = milliseconds(30'000)});
        },
        "rank 1: the mode is FSDP; ");
    cells.expect_usage_error(
        [&] {
          std::vector<mesh::Axis> axes = {{"replicate", 2}, {"shard", 1}};
          if (odd) std::ranges::reverse(axes);
          setup_distributed(
              {.mode = ParallelMode::FSDP, .mesh = axes, .timeout = milliseconds(30'000)});
        },
        "rank 1: axis 0 of mesh is shard of size 1; ");
  });
  cells.cell("what the main rank throws, whatever it is", [&] {
    std::string heard;
    try {
      train::on_main_rank(dist, []() -> std::string { throw 7; });
    } catch (const int number) {
      heard = std::to_string(number);
    } catch (const train::TrainingStopped& error) {
      heard = error.what();
    }
    cells.expect(dist.is_main() ? heard == "7" : heard.starts_with("the main rank failed"),
                 "heard: " + heard);
  });
  cells.cell("a generation that is over, which the main rank finds", [&] {
    std::string heard;
    try {
      train::on_main_rank(dist, []() -> std::string {
        throw CommError({.operation = "writing", .explanation = "Another has taken it over."});
      });
    } catch (const CommError& error) {
      heard = error.what();
    }
    cells.expect(heard.starts_with("writing failed: aborted") &&
                     heard.ends_with("Another has taken it over."),
                 "heard: " + heard);
  });
  cells.cell("batch norms that a rank would have no sample for", [&] {
    auto net = std::make_shared<Normed>();
    DistributedManager job = dist;
    job.convert_sync_batchnorm(net);
    TrainerOptions short_of_one = options(0.1, LearningRateScaling::none);
    DistributedTrainer trainer(job, net, kMean, short_of_one);
    cells.expect_usage_error([&] { trainer.fit(Line(15)); },
                             "1 of 15 samples, too few for 2 ranks");
    short_of_one.drop_last = true;
    DistributedTrainer dropping(job, net, kMean, short_of_one);
    cells.expect(dropping.fit(Line(15)).step == 1, "the whole batch was not trained on");
  });
}

}  // namespace lockstep
