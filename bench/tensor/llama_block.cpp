// Compares a block of a Llama whose layers are cut over the ranks of a tensor axis with the whole
// block on one rank: milliseconds of forward + backward, float32. It takes the best of several runs
// in turns in one job, so that other work on the machine counts as little as possible. A rank has
// one thread. While one rank computes alone the others wait; the time of all ranks together lasts
// until the last one is done.
//
//   lockstep run --standalone --nproc-per-node 2 build/release/bench/tensor_llama_block [runs
//   [batch [length…]]]
//
// The last columns are the speed-up of all ranks over one rank, in all and for forward and
// backward. Then follows the same for the processor time of the busiest rank, its communication
// included, which is the speed-up if every rank has a core to itself and never waits.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/comm/world/join.h>
#include <lockstep/models/make_model.h>

namespace {

using namespace lockstep;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kWidth = 1024;
// A block in the middle of the model: neither embeddings nor the output are measured.
constexpr mesh::Interval kBlock{.begin = 1, .end = 2};

double processor_milliseconds() {
  std::timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

// Milliseconds.
struct Best {
  double forward = std::numeric_limits<double>::infinity();
  double backward = std::numeric_limits<double>::infinity();
  double processor = std::numeric_limits<double>::infinity();  // of forward and backward
  double sum() const { return forward + backward; }
};

struct Arm {
  std::string name;
  std::shared_ptr<models::LanguageModel> model;
  std::vector<at::Tensor> leaves;  // x [batch, length or a slice of it, width], the weights
  bool alone = false;              // rank 0 computes, the others wait
  Best best;
};

class Measure {
 public:
  Measure(comm::Communicator& world, std::int64_t batch, std::int64_t length)
      : world_(world), tokens_(at::zeros({batch, length}, at::kLong)) {}

  void run(Arm& arm) {
    const bool takes_part = !arm.alone || world_.rank() == 0;
    at::Tensor result;
    double processor = 0.0;
    const double forward = time(processor, [&] {
      if (takes_part) result = arm.model->run_layers(kBlock, tokens_, arm.leaves.front());
    });
    const double backward = time(processor, [&] {
      if (takes_part) torch::autograd::grad({result}, arm.leaves, {at::ones_like(result)});
    });
    const auto busiest = at::full({1}, processor, at::kDouble);
    world_.all_reduce(busiest, comm::ReduceOp::max).wait();
    arm.best.forward = std::min(arm.best.forward, forward);
    arm.best.backward = std::min(arm.best.backward, backward);
    arm.best.processor = std::min(arm.best.processor, busiest.item<double>());
  }

 private:
  double time(double& processor, const std::function<void()>& body) {
    world_.barrier().wait();
    const auto begin = Clock::now();
    const double processor_begin = processor_milliseconds();
    body();
    processor += processor_milliseconds() - processor_begin;
    world_.barrier().wait();
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

  comm::Communicator& world_;
  at::Tensor tokens_;  // [batch, length]: only their shape matters
};

Arm make_arm(std::string name, const std::shared_ptr<nn::TensorAxis>& axis, std::int64_t batch,
             std::int64_t length) {
  models::ModelConfig config{.family = "llama",
                             .vocab_size = 64,
                             .hidden_size = kWidth,
                             .num_layers = 3,
                             .num_heads = 16,
                             .intermediate_size = 2752,
                             .max_positions = length};
  Arm arm{.name = std::move(name), .model = models::make_model(config, 1)};
  if (axis != nullptr) arm.model->spread({.tensor = axis});
  arm.model->keep_layers({kBlock});
  const bool sliced = axis != nullptr && axis->by_positions();
  arm.leaves = {
      at::randn({batch, sliced ? length / axis->size() : length, kWidth}).requires_grad_()};
  for (const at::Tensor& parameter : arm.model->parameters()) arm.leaves.push_back(parameter);
  arm.alone = axis == nullptr;
  return arm;
}

void compare(const std::shared_ptr<comm::Communicator>& world, std::int64_t batch,
             std::int64_t length, int runs) {
  Measure measure(*world, batch, length);
  std::vector<Arm> arms;
  arms.push_back(make_arm("one rank", nullptr, batch, length));
  arms.push_back(make_arm("cut", std::make_shared<nn::TensorAxis>(world), batch, length));
  arms.push_back(make_arm("cut, by positions",
                          std::make_shared<nn::TensorAxis>(world, nn::BetweenLayers::by_positions),
                          batch, length));
  for (int i = 0; i < runs; ++i)
    for (Arm& arm : arms) measure.run(arm);
  if (world->rank() != 0) return;
  const Best& alone = arms.front().best;
  for (const Arm& arm : arms)
    std::printf("%lld x %lld positions, %-18s %8.2f + %8.2f ms   %5.2f (%5.2f, %5.2f)   %5.2f\n",
                static_cast<long long>(batch), static_cast<long long>(length), arm.name.c_str(),
                arm.best.forward, arm.best.backward, alone.sum() / arm.best.sum(),
                alone.forward / arm.best.forward, alone.backward / arm.best.backward,
                alone.processor / arm.best.processor);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const auto world = comm::join_world();
  const int runs = argc > 1 ? std::atoi(argv[1]) : 5;
  const std::int64_t batch = argc > 2 ? std::atoll(argv[2]) : 1;
  std::vector<std::int64_t> lengths;
  for (int i = 3; i < argc; ++i) lengths.push_back(std::atoll(argv[i]));
  if (lengths.empty()) lengths = {256, 512};
  for (const auto length : lengths) compare(world, batch, length, runs);
}
