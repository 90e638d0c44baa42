// Context-parallel attention beside one rank's attention on the whole sequence: milliseconds of
// forward + backward, causal, 8 heads of 64, the best of several runs taken in turns in one job, so
// that other work on the machine counts as little as it can. A rank has one thread. While one rank
// computes alone the others wait; of the ranks together it is the time until the last is done.
//
//   lockstep run --standalone --nproc-per-node 2 build/release/bench/context_attention [runs
//   [length…]]
//
// The last columns are the time over a rank's share of one rank's time, where 1 is the best there
// can be (in all, and of forward + backward), and the same of the processor time that the busiest
// rank took, its communication's included: what the first is where every rank has a core to itself
// and waits for nobody.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <spdlog/fmt/fmt.h>
#include <torch/csrc/autograd/autograd.h>

#include <lockstep/comm/world.h>
#include <lockstep/nn/attention.h>
#include <lockstep/nn/context_parallel.h>

namespace {

using namespace lockstep;
using Tensors = std::vector<at::Tensor>;
using Computation = std::function<at::Tensor(const Tensors&)>;
using Clock = std::chrono::steady_clock;

// Milliseconds.
struct Best {
  double forward = std::numeric_limits<double>::infinity();
  double backward = std::numeric_limits<double>::infinity();
  double processor = std::numeric_limits<double>::infinity();  // of both
  double sum() const { return forward + backward; }
};

double processor_milliseconds() {
  std::timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

// Who computes: the others wait for them.
enum class Who { first, all };

class Measure {
 public:
  explicit Measure(comm::Communicator& world) : world_(world) {}

  void run(Who who, const Computation& computation, const Tensors& inputs, Best& best) {
    at::Tensor result;
    const bool takes_part = who == Who::all || world_.rank() == 0;
    double processor = 0.0;
    const auto forward = time(processor, [&] {
      if (takes_part) result = computation(inputs);
    });
    const auto backward = time(processor, [&] {
      if (takes_part) torch::autograd::grad({result}, inputs, {at::ones_like(result)});
    });
    auto busiest = at::full({1}, processor, at::kDouble);
    world_.all_reduce(busiest, comm::ReduceOp::max).wait();
    best.forward = std::min(best.forward, forward);
    best.backward = std::min(best.backward, backward);
    best.processor = std::min(best.processor, busiest.item<double>());
  }

 private:
  double time(double& processor, const std::function<void()>& body) {
    world_.barrier().wait();
    const auto begin = Clock::now();
    const auto processor_begin = processor_milliseconds();
    body();
    processor += processor_milliseconds() - processor_begin;
    world_.barrier().wait();
    return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
  }

  comm::Communicator& world_;
};

Tensors drawn(std::int64_t length) {
  Tensors inputs;
  // As projections give them: [batch, length, heads, head_dim] in memory.
  for (int i = 0; i < 3; ++i)
    inputs.push_back(at::randn({1, length, 8, 64}).transpose(1, 2).requires_grad_());
  return inputs;
}

struct Arm {
  nn::ContextAlgorithm algorithm;
  nn::SplitKind split;
  Best best;

  std::string name() const { return fmt::format("{}, {}", nn::name(algorithm), nn::name(split)); }
};

void compare(const std::shared_ptr<comm::Communicator>& world, std::int64_t length, int runs) {
  Measure measure(*world);
  const int ranks = world->size();
  const auto whole = drawn(length), part = drawn(length / ranks);
  Best alone;
  std::vector<Arm> arms = {{nn::ContextAlgorithm::ring, nn::SplitKind::zigzag, {}},
                           {nn::ContextAlgorithm::ring, nn::SplitKind::contiguous, {}},
                           {nn::ContextAlgorithm::all_to_all, nn::SplitKind::zigzag, {}}};
  for (int i = 0; i < runs; ++i) {
    measure.run(
        Who::first, [](const Tensors& in) { return nn::attention(in[0], in[1], in[2]); }, whole,
        alone);
    for (auto& arm : arms)
      measure.run(
          Who::all,
          [&](const Tensors& in) {
            return nn::context_parallel_attention(in[0], in[1], in[2], world,
                                                  {.algorithm = arm.algorithm, .split = arm.split});
          },
          part, arm.best);
  }
  if (world->rank() != 0) return;
  std::printf("%6lld positions, one rank           %8.2f + %8.2f ms\n",
              static_cast<long long>(length), alone.forward, alone.backward);
  for (const auto& arm : arms)
    std::printf(
        "%6lld positions, %-18s %8.2f + %8.2f ms   %5.3f (%5.3f + %5.3f)   %5.3f\n",
        static_cast<long long>(length), arm.name().c_str(), arm.best.forward, arm.best.backward,
        arm.best.sum() * ranks / alone.sum(), arm.best.forward * ranks / alone.forward,
        arm.best.backward * ranks / alone.backward, arm.best.processor * ranks / alone.processor);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const auto world = comm::join_world();
  const int runs = argc > 1 ? std::atoi(argv[1]) : 5;
  std::vector<std::int64_t> lengths;
  for (int i = 2; i < argc; ++i) lengths.push_back(std::atoll(argv[i]));
  if (lengths.empty()) lengths = {2048, 4096, 8192};
  for (const auto length : lengths) compare(world, length, runs);
}
