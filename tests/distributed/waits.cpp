#include "waits.h"

#include <regex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <spdlog/fmt/fmt.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/distributed/distributed.h>

namespace lockstep {

namespace {

using ranks::Cells;

constexpr milliseconds kWaitDeadline(60'000);

struct WaitingNetImpl : torch::nn::Module {
  torch::nn::ModuleList layers{register_module("layers", torch::nn::ModuleList())};
  WaitingNetImpl() {
    for (int i = 0; i < 3; ++i) layers->push_back(torch::nn::Linear(8, 8));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = at::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
};
TORCH_MODULE(WaitingNet);

struct Difference {
  std::string name;
  ShardingStrategy strategy;
  // A step of the ranks, in which the last rank does something else than the others.
  std::function<void(DistributedManager&, WaitingNet&, bool last)> step;
};

std::vector<Difference> differences() {
  using enum ShardingStrategy;
  const auto sum_of = [](WaitingNet& model) { return model->forward(at::ones({3, 8})).sum(); };
  std::vector<Difference> all;
  for (const ShardingStrategy strategy : {NO_SHARD, FULL_SHARD}) {
    const std::string name = strategy == NO_SHARD ? "NO_SHARD" : "FULL_SHARD";
    all.push_back({name + ": a rank without samples skips backward and calls mean()", strategy,
                   [sum_of](DistributedManager& dist, WaitingNet& model, bool last) {
                     if (!last) sum_of(model).backward();
                     dist.mean(1);
                   }});
  }
  all.push_back({"after a call on a thread that ran a backward pass", NO_SHARD,
                 [sum_of](DistributedManager& dist, WaitingNet& model, bool last) {
                   const at::Tensor hooked = at::ones({1}).requires_grad_() * 2;
                   hooked.register_hook([&](const at::Tensor&) {
                     // As autograd has its threads for devices run a pass.
                     const at::ThreadLocalState state;
                     std::thread([&] {
                       const at::ThreadLocalStateGuard guard(state);
                       dist.mean(1);
                     }).join();
                   });
                   hooked.backward();
                   if (!last) sum_of(model).backward();
                   dist.mean(1);
                 }});
  all.push_back({"an input requires a gradient on one rank only", FULL_SHARD,
                 [](DistributedManager& dist, WaitingNet& model, bool last) {
                   const at::Tensor input = at::ones({3, 8}).requires_grad_(last);
                   model->forward(input).sum().backward();
                   dist.mean(1);
                 }});
  all.push_back({"backward(model, zeros, 0) on one rank", FULL_SHARD,
                 [sum_of](DistributedManager& dist, WaitingNet& model, bool last) {
                   dist.backward(model, last ? at::zeros({}) : sum_of(model), last ? 0 : 3);
                   dist.mean(1);
                 }});
  return all;
}

// Expects both calls in the text, with their groups and numbers, and which rank waits for which.
void expect_both_calls(Cells& cells, const std::string& text) {
  static const std::regex wait("rank ([0-9]) waits in [a-z_]+ #[0-9]+ \\([^)]*\\) of group '[^']+' "
                               "\\([a-z_]+\\.(cpp|h):[0-9]+\\) for rank ([0-9])");
  const int waits = static_cast<int>(
      std::distance(std::sregex_iterator(text.begin(), text.end(), wait), std::sregex_iterator()));
  cells.expect(text.find("Ranks wait for each other in different calls") != std::string::npos &&
                   waits == 2 && text.find("mismatch") != std::string::npos &&
                   text.find("Usual causes: ") != std::string::npos,
               "the error does not name both calls: " + text);
  cells.expect(text.find(", subject ") == std::string::npos, "numbers of our own: " + text);
}

}  // namespace

void check_waits(Cells& cells) {
  for (const Difference& difference : differences()) {
    cells.cell(difference.name, [&] {
      DistributedManager dist = setup_distributed({.mode = ParallelMode::FSDP,
                                                   .sharding_strategy = difference.strategy,
                                                   .timeout = kWaitDeadline,
                                                   .device_type = c10::DeviceType::CPU});
      WaitingNet model = dist.wrap_model(WaitingNet());
      std::string text;
      try {
        difference.step(dist, model, dist.rank() == dist.world_size() - 1);
        dist.barrier();
      } catch (const CommError& error) {
        text = error.what();
      }
      expect_both_calls(cells, text);
    });
  }
}

}  // namespace lockstep
