// Measures what data parallelism costs a model with many small parameters: backward passes of 1,000
// linear layers in a row, 2,000 parameters, alone and with each strategy.
//
//   lockstep run --nproc-per-node 2 build/dev/bench/many_parameters [WIDTH [STEPS [STRATEGY]]]
//
// Prints milliseconds of wall time, of the thread's CPU time and of all threads' CPU time on a
// rank: medians of passes alone, of passes spread over the ranks and of their ratios, and
// full_gradient() of every parameter. On a busy machine wall times say little.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/distributed/distributed.h>

namespace {

constexpr int kLayers = 1000;

torch::nn::Sequential make(std::int64_t width) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) model->push_back(torch::nn::Linear(width, width));
  return model;
}

struct Times {
  double clock = 0, thread = 0, process = 0;
};

double now_ms(clockid_t which) {
  timespec time{};
  clock_gettime(which, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

Times now() {
  return {now_ms(CLOCK_MONOTONIC), now_ms(CLOCK_THREAD_CPUTIME_ID),
          now_ms(CLOCK_PROCESS_CPUTIME_ID)};
}

Times times_of(const std::function<void()>& work) {
  const Times start = now();
  work();
  const Times end = now();
  return {end.clock - start.clock, end.thread - start.thread, end.process - start.process};
}

double median(const std::vector<Times>& times, double Times::*which) {
  std::vector<double> values;
  for (const Times& one : times) values.push_back(one.*which);
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Times backward_times(torch::nn::Sequential& model, std::int64_t width) {
  model->zero_grad();
  const at::Tensor loss = model->forward(at::ones({4, width})).sum();
  return times_of([&] { loss.backward(); });
}

void print(const char* name, const std::vector<Times>& times) {
  std::printf("%-17s %8.2f %8.2f %8.2f\n", name, median(times, &Times::clock),
              median(times, &Times::thread), median(times, &Times::process));
}

}  // namespace

int main(int argc, char** argv) {
  using lockstep::ShardingStrategy;
  const std::int64_t width = argc > 1 ? std::atoll(argv[1]) : 32;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 20;
  at::set_num_threads(1);
  struct Row {
    const char* name;
    ShardingStrategy strategy;
    std::int64_t consistency_check_interval;
  };
  const Row kRows[] = {{"NO_SHARD", ShardingStrategy::NO_SHARD, 0},
                       {"  compares always", ShardingStrategy::NO_SHARD, 1},
                       {"SHARD_OPTIMIZER", ShardingStrategy::SHARD_OPTIMIZER, 0},
                       {"FULL_SHARD", ShardingStrategy::FULL_SHARD, 0}};
  const std::string only = argc > 3 ? argv[3] : "";
  for (const auto& [name, strategy, interval] : kRows) {
    if (!only.empty() && only != name) continue;
    auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP,
                                             .sharding_strategy = strategy,
                                             .device_type = c10::DeviceType::CPU,
                                             .consistency_check_interval = interval});
    auto alone = make(width);
    auto model = dist.wrap_model(make(width));
    // The two take turns, so that other work on the machine costs both the same.
    std::vector<Times> plain, spread, ratios;
    for (int i = 0; i < steps; ++i) {
      plain.push_back(backward_times(alone, width));
      spread.push_back(backward_times(model, width));
      ratios.push_back({spread.back().clock / plain.back().clock,
                        spread.back().thread / plain.back().thread,
                        spread.back().process / plain.back().process});
    }
    const auto names = model->named_parameters().keys();
    const Times gradients = times_of([&] {
      for (const std::string& one : names) dist.full_gradient(model, one);
    });
    if (!dist.is_main()) continue;
    print("plain", plain);
    print(name, spread);
    print("  ratio", ratios);
    print("  full_gradient", {gradients});
  }
}
