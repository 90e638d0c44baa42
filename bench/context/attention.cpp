// Compares context-parallel attention with one rank's attention on the whole sequence: milliseconds
// of forward + backward, causal, 8 heads of 64. It takes the best of several runs in turns in one
// job, so that other work on the machine counts as little as possible. A rank has one thread. While
// one rank computes alone the others wait; the time of all ranks together lasts until the last one
// is done.
//
//   lockstep run --standalone --nproc-per-node 2 build/release/bench/context_attention [runs
//   [length…]]
//
// The second row is the same computation without communication: every rank computes its part of the
// ring, at the same time as the others, on keys and values that it already has. It includes what
// cores lose to each other because they share caches, memory and clock.
//
// The last columns are the time divided by a rank's share of one rank's time, in all and for
// forward + backward; 1 is the best possible. Then follows the same for the processor time of the
// busiest rank, its communication included, which is the time if every rank has a core to itself
// and never waits.
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

#include <lockstep/comm/world/join.h>
#include <lockstep/nn/context_parallel/context_parallel.h>
#include <lockstep/nn/context_parallel/ring_attention.h>
#include <lockstep/nn/layers/attention.h>

namespace {

using namespace lockstep;
using Tensors = std::vector<at::Tensor>;
using Computation = std::function<at::Tensor(const Tensors&)>;

// One pass of every rank, in two halves.
struct Pass {
  std::function<void()> forward;
  std::function<void()> backward;
};
using Clock = std::chrono::steady_clock;

// Milliseconds.
struct Best {
  double forward = std::numeric_limits<double>::infinity();
  double backward = std::numeric_limits<double>::infinity();
  double processor = std::numeric_limits<double>::infinity();  // of forward and backward
  double sum() const { return forward + backward; }
};

double processor_milliseconds() {
  std::timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

// The ranks that compute; the others wait for them.
enum class Who { first, all };

class Measure {
 public:
  explicit Measure(comm::Communicator& world) : world_(world) {}

  void run(Who who, const Computation& computation, const Tensors& inputs, Best& best) {
    at::Tensor result;
    run(who,
        {.forward = [&] { result = computation(inputs); },
         .backward = [&] { torch::autograd::grad({result}, inputs, {at::ones_like(result)}); }},
        best);
  }

  void run(Who who, const Pass& pass, Best& best) {
    const bool takes_part = who == Who::all || world_.rank() == 0;
    double processor = 0.0;
    const auto forward = time(processor, [&] {
      if (takes_part) pass.forward();
    });
    const auto backward = time(processor, [&] {
      if (takes_part) pass.backward();
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
  // In the memory layout of projections: [batch, length, heads, head_dim].
  for (int i = 0; i < 3; ++i)
    inputs.push_back(at::randn({1, length, 8, 64}).transpose(1, 2).requires_grad_());
  return inputs;
}

// A rank's computation in a zigzag ring, with its own keys in place of all other ranks'.
class SilentRing {
 public:
  SilentRing(const Tensors& part, int rank, int size)
      : q_(part[0].detach()),
        k_(part[1].detach()),
        v_(part[2].detach()),
        rank_(rank),
        size_(size) {}

  void forward() {
    result_ = nn::internal::attend(q_, k_, v_, kTerms);
    others([&](const auto& sight, const auto& terms) {
      nn::internal::attend_more(
          {queries(result_.output, sight), queries(result_.log_sum_exp, sight)}, queries(q_, sight),
          keys(k_, sight), keys(v_, sight), terms);
    });
  }

  void backward() {
    const auto grad = at::ones_like(result_.output);
    const nn::internal::AttentionGradients gradients{at::zeros_like(q_), at::zeros_like(k_),
                                                     at::zeros_like(v_)};
    nn::internal::add_gradients(gradients, grad, q_, k_, v_, result_, kTerms);
    others([&](const auto& sight, const auto& terms) {
      nn::internal::add_gradients(
          {queries(gradients.q, sight), keys(gradients.k, sight), keys(gradients.v, sight)},
          queries(grad, sight), queries(q_, sight), keys(k_, sight), keys(v_, sight),
          {queries(result_.output, sight), queries(result_.log_sum_exp, sight)}, terms);
    });
  }

 private:
  using Sight = nn::internal::BlockSight;
  static constexpr nn::internal::AttentionTerms kTerms{.causal = true, .scale = 0.125};

  void others(const std::function<void(const Sight&, const nn::internal::AttentionTerms&)>& body) {
    for (int owner = 0; owner < size_; ++owner) {
      if (owner == rank_) continue;
      const auto sight = nn::internal::sight_of({.rank = rank_, .size = size_}, owner, q_.size(2),
                                                /*causal=*/true);
      body(sight, {.causal = sight.causal, .scale = kTerms.scale});
    }
  }
  static at::Tensor queries(const at::Tensor& x, const Sight& sight) {
    return x.narrow(2, sight.queries.begin, sight.queries.size());
  }
  static at::Tensor keys(const at::Tensor& x, const Sight& sight) {
    return x.narrow(2, sight.keys.begin, sight.keys.size());
  }

  at::Tensor q_, k_, v_;
  int rank_, size_;
  nn::internal::AttentionResult result_;
};

struct Arm {
  nn::ContextAlgorithm algorithm;
  nn::SplitKind split;
  Best best;

  std::string name() const {
    return fmt::format("{}, {}", mesh::name(algorithm), mesh::name(split));
  }
};

void compare(const std::shared_ptr<comm::Communicator>& world, std::int64_t length, int runs) {
  Measure measure(*world);
  const int ranks = world->size();
  const auto whole = drawn(length), part = drawn(length / ranks);
  Best alone, silent;
  SilentRing silent_ring(part, world->rank(), ranks);
  std::vector<Arm> arms = {{nn::ContextAlgorithm::ring, nn::SplitKind::zigzag, {}},
                           {nn::ContextAlgorithm::ring, nn::SplitKind::contiguous, {}},
                           {nn::ContextAlgorithm::all_to_all, nn::SplitKind::zigzag, {}}};
  for (int i = 0; i < runs; ++i) {
    measure.run(
        Who::first, [](const Tensors& in) { return nn::attention(in[0], in[1], in[2]); }, whole,
        alone);
    measure.run(
        Who::all,
        {.forward = [&] { silent_ring.forward(); }, .backward = [&] { silent_ring.backward(); }},
        silent);
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
  const auto print = [&](const std::string& name, const Best& best) {
    std::printf("%6lld positions, %-18s %8.2f + %8.2f ms   %5.3f (%5.3f + %5.3f)   %5.3f\n",
                static_cast<long long>(length), name.c_str(), best.forward, best.backward,
                best.sum() * ranks / alone.sum(), best.forward * ranks / alone.forward,
                best.backward * ranks / alone.backward, best.processor * ranks / alone.processor);
  };
  print("nobody talks", silent);
  for (const auto& arm : arms) print(arm.name(), arm.best);
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
