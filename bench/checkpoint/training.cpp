// Measures how much an asynchronous save slows the steps beside it. Trains the GPT of
// bench/training, data parallel: some steps without a save, then one save and the steps until it is
// complete, and again. Runs under `lockstep run`, or alone as one rank. Arguments: a folder, the
// number of saves, and the number of steps between two of them. The main rank prints a line of
// JSON.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include <ATen/Parallel.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/models/make_model.h>
#include <lockstep/parallel/data_parallel/model_parameters.h>
#include <lockstep/recovery/checkpointer.h>

#include "../training/job.h"

namespace {

using namespace lockstep;
using namespace lockstep::bench;

class Training {
 public:
  explicit Training(const std::filesystem::path& folder)
      : dist_(setup_distributed({.device_type = c10::kCPU})),
        checkpoints_(dist_, folder, {.keep_last = 1}) {
    dist_.wrap_model(model_);
    optimizer_ =
        dist_.make_optimizer(model_, optim::AdamWOptions{.betas = {kBeta1, kBeta2}},
                             optim::decay_groups(data_parallel::trained_parameters(*model_),
                                                 kWeightDecay, optim::DecayRule::everything));
    at::manual_seed(static_cast<std::uint64_t>(1 + dist_.rank()));
    const auto tokens = at::randint(kVocabulary, {kBatch, kTokens + 1}, at::kLong);
    inputs_ = tokens.narrow(1, 0, kTokens).contiguous();
    targets_ = tokens.narrow(1, 1, kTokens).contiguous();
  }

  // One save and the steps around it. The first cycle does not count: the first save allocates
  // memory, and the first steps learn their order.
  void cycle(int steps_without, bool first) {
    Cycle cycle;
    for (int step = 0; step < steps_without; ++step)
      cycle.without_ms.push_back(milliseconds([&] { train(); }));
    const auto begin = std::chrono::steady_clock::now();
    cycle.stall_ms = milliseconds([&] {
      checkpoints_.save(
          {.tensors = state_of(dist_, model_, *optimizer_), .state = {.step = step_}});
    });
    while (checkpoints_.under_way()) {
      cycle.during_ms.push_back(milliseconds([&] {
        train();
        const double poll_ms = milliseconds([&] {
          if (const auto saved = checkpoints_.poll(); saved && !saved->ok())
            throw UsageError(saved->error);
        });
        cycle.longest_poll_ms = std::max(cycle.longest_poll_ms, poll_ms);
      }));
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    cycle.save_seconds = took.count();
    if (first)
      first_stall_ms_ = cycle.stall_ms;
    else
      cycles_.push_back(std::move(cycle));
  }

  void report() const {
    if (!dist_.is_main()) return;
    std::vector<std::string> texts;
    for (const Cycle& one : cycles_)
      texts.push_back(
          fmt::format("{{\"without_ms\": [{:.3f}], \"during_ms\": [{:.3f}], \"stall_ms\": {:.3f}, "
                      "\"longest_poll_ms\": {:.3f}, \"save_seconds\": {:.4f}}}",
                      fmt::join(one.without_ms, ", "), fmt::join(one.during_ms, ", "), one.stall_ms,
                      one.longest_poll_ms, one.save_seconds));
    fmt::print("{{\"who\": \"lockstep\", \"what\": \"training\", \"ranks\": {}, \"bytes\": {}, "
               "\"first_stall_ms\": {:.3f}, \"cycles\": [{}]}}\n",
               dist_.world_size(), checkpoints_.bytes_written(), first_stall_ms_,
               fmt::join(texts, ", "));
    std::fflush(stdout);
  }

  void finish() const { dist_.barrier(); }

 private:
  struct Cycle {
    std::vector<double> without_ms, during_ms;
    double stall_ms = 0, longest_poll_ms = 0, save_seconds = 0;
  };

  template <typename Work>
  static double milliseconds(const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
        .count();
  }

  void train() {
    optimizer_->zero_grad();
    const auto loss = model_->loss(inputs_, targets_);
    dist_.backward(model_, loss.sum, loss.count);
    optimizer_->step(kLearningRate);
    ++step_;
  }

  DistributedManager dist_;
  Checkpointer checkpoints_;
  std::shared_ptr<models::LanguageModel> model_ = models::make_model({.vocab_size = kVocabulary,
                                                                      .hidden_size = kWidth,
                                                                      .num_layers = kLayers,
                                                                      .num_heads = kHeads,
                                                                      .max_positions = kTokens},
                                                                     1);
  std::unique_ptr<optim::Optimizer> optimizer_;
  at::Tensor inputs_, targets_;  // [batch, tokens]
  std::int64_t step_ = 0;
  double first_stall_ms_ = 0;
  std::vector<Cycle> cycles_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: checkpoint_training FOLDER SAVES STEPS\n");
    return 2;
  }
  at::set_num_threads(1);
  Training training(argv[1]);
  training.cycle(3, true);
  for (int cycle = 0; cycle < std::atoi(argv[2]); ++cycle)
    training.cycle(std::atoi(argv[3]), false);
  training.report();
  training.finish();
}
