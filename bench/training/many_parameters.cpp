// What data parallelism costs a model of many small parameters: backward passes of 1,000 linear
// layers in a row, 2,000 parameters, alone and with each strategy.
//
//   lockstep run --nproc-per-node 2 build/dev/bench/many_parameters [WIDTH [STEPS]]
//
// Prints milliseconds of CPU time of a rank: the median of the passes, and full_gradient() of every
// parameter.
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

double median_ms(int times, const std::function<double()>& measure) {
  std::vector<double> results;
  for (int i = 0; i < times; ++i) results.push_back(measure());
  std::nth_element(results.begin(), results.begin() + times / 2, results.end());
  return results[static_cast<std::size_t>(times) / 2];
}

// Of this process's threads together: what a busy machine does not change.
double cpu_ms(const std::function<void()>& work) {
  const auto now = [] {
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
  };
  const double start = now();
  work();
  return now() - start;
}

double backward_ms(torch::nn::Sequential& model, std::int64_t width, int steps) {
  const at::Tensor input = at::ones({4, width});
  return median_ms(steps, [&] {
    model->zero_grad();
    const at::Tensor loss = model->forward(input).sum();
    return cpu_ms([&] { loss.backward(); });
  });
}

}  // namespace

int main(int argc, char** argv) {
  using lockstep::ShardingStrategy;
  const std::int64_t width = argc > 1 ? std::atoll(argv[1]) : 32;
  const int steps = argc > 2 ? std::atoi(argv[2]) : 20;
  at::set_num_threads(1);
  const auto print = [&](const lockstep::DistributedManager& dist, const char* name, double ms) {
    if (dist.is_main()) std::printf("%-16s %7.2f ms\n", name, ms);
  };
  auto plain = make(width);
  const std::pair<const char*, ShardingStrategy> kStrategies[] = {
      {"NO_SHARD", ShardingStrategy::NO_SHARD},
      {"SHARD_OPTIMIZER", ShardingStrategy::SHARD_OPTIMIZER},
      {"FULL_SHARD", ShardingStrategy::FULL_SHARD}};
  for (const auto& [name, strategy] : kStrategies) {
    auto dist = lockstep::setup_distributed({.mode = lockstep::ParallelMode::FSDP,
                                             .sharding_strategy = strategy,
                                             .device_type = c10::DeviceType::CPU});
    print(dist, "plain", backward_ms(plain, width, steps));
    auto model = dist.wrap_model(make(width));
    print(dist, name, backward_ms(model, width, steps));
    const auto names = model->named_parameters().keys();
    print(dist, "full_gradient", cpu_ms([&] {
            for (const std::string& one : names) dist.full_gradient(model, one);
          }));
  }
}
