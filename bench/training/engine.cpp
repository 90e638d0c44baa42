// Measures what an engine adds to a step: a GPT of plain torch::nn, trained by
// lockstep::initialize() and in a loop of the program's own with setup_distributed(), clipped
// gradients and AdamW, by turns, step by step.
//
//   lockstep run --nproc-per-node 2 build/release/bench/training_engine [STEPS [WARM-UP]]
//
// On a CPU the model is the one of the other programs here, on a GPU GPT-2 124M. Prints medians of
// a step's milliseconds, wall time and CPU time of all threads, of both and of their ratio. On a
// busy machine wall times say little.
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <vector>

#include <lockstep/distributed/distributed.h>
#include <lockstep/train/engine.h>

#include "torch_gpt.h"

namespace {

using namespace lockstep;
using namespace lockstep::bench;

struct Medians {
  double own = 0, engine = 0, ratio = 0;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The two change places after each turn, and whoever takes two steps in a row finds warm caches in
// the second: so two turns together are compared.
Medians medians(const std::vector<double>& own, const std::vector<double>& engine, int warm_up) {
  std::vector<double> own_pairs, engine_pairs, ratios;
  for (auto i = static_cast<std::size_t>(warm_up); i + 1 < own.size(); i += 2) {
    own_pairs.push_back((own[i] + own[i + 1]) / 2);
    engine_pairs.push_back((engine[i] + engine[i + 1]) / 2);
    ratios.push_back(engine_pairs.back() / own_pairs.back());
  }
  return {median(own_pairs), median(engine_pairs), median(ratios)};
}

}  // namespace

int main(int argc, char** argv) {
  const StepCount count = step_count(argc, argv, 1);
  auto dist = setup_distributed();
  const bool on_gpu = dist.device().is_cuda();
  const GptShape shape =
      on_gpu
          ? GptShape{.vocabulary = 50304, .width = 768, .layers = 12, .heads = 12, .tokens = 1024}
          : GptShape{};
  const std::int64_t batch = on_gpu ? 8 : kBatch;
  auto model = dist.wrap_model<TorchGpt>(shape);
  auto adamw =
      dist.make_optimizer(model, optim::AdamWOptions{.betas = {kBeta1, kBeta2}}, kWeightDecay);
  auto engine = initialize(EngineConfig::from_json(R"({
      "train_micro_batch_size_per_gpu": 4,
      "gradient_clipping": 1.0,
      "optimizer": {"type": "AdamW",
                    "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}}})"),
                           [&] { return std::make_shared<TorchGptImpl>(shape); });
  {
    const torch::NoGradGuard no_grad;
    const auto own = model->parameters(), engines = engine.model()->parameters();
    for (std::size_t i = 0; i < own.size(); ++i) engines[i].copy_(own[i]);
  }

  at::manual_seed(static_cast<std::uint64_t>(1 + dist.rank()));
  const auto tokens = at::randint(shape.vocabulary, {batch, shape.tokens + 1}, at::kLong);
  const auto inputs = tokens.narrow(1, 0, shape.tokens).contiguous().to(dist.device());
  const auto targets = tokens.narrow(1, 1, shape.tokens).contiguous().to(dist.device());

  float own_loss = 0, engine_loss = 0;
  StepClock own_clock, engine_clock;
  const auto own_step = [&] {
    own_clock.begin();
    adamw->zero_grad();
    const auto loss = model->forward(inputs, targets);
    loss.backward();
    dist.clip_gradients(model, 1.0);
    adamw->step(kLearningRate);
    own_loss = loss.item<float>();
    own_clock.end();
  };
  const auto engine_step = [&] {
    engine_clock.begin();
    const auto loss = engine.model()->forward(inputs, targets);
    engine.backward(loss * batch, batch);
    engine.step();
    engine_loss = loss.item<float>();
    engine_clock.end();
  };
  for (int step = 0; step < count.warm_up + count.timed; ++step) {
    if (step % 2 == 0) own_step();
    engine_step();
    if (step % 2 == 1) own_step();
  }
  if (!dist.is_main()) return 0;
  const Medians wall = medians(own_clock.wall(), engine_clock.wall(), count.warm_up);
  const Medians cpu = medians(own_clock.cpu(), engine_clock.cpu(), count.warm_up);
  std::printf("%-12s %9s %9s\n", "ms a step", "wall", "CPU");
  std::printf("%-12s %9.3f %9.3f\n", "own loop", wall.own, cpu.own);
  std::printf("%-12s %9.3f %9.3f\n", "engine", wall.engine, cpu.engine);
  std::printf("%-12s %9.4f %9.4f\n", "  ratio", wall.ratio, cpu.ratio);
  std::printf("losses of the last step: %.9g and %.9g\n", own_loss, engine_loss);
}
