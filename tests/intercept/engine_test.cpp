#include <lockstep/intercept/backward.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <lockstep/base/thread_number.h>
#include <lockstep/device/backward_thread.h>

namespace lockstep::intercept {
namespace {

struct Counter : PassListener {
  int num_passes = 0;
  int num_inner = 0;
  bool refuses = false;
  std::vector<at::Tensor> looked_for = {};
  bool reached = false;
  void before_pass(const Pass& pass) override {
    ++num_passes;
    reached = pass.reaches(looked_for);
    if (refuses) throw std::runtime_error("not this pass");
  }
};

struct InnerCounter : Counter {
  void before_inner_pass(const Pass& pass) override {
    ++num_inner;
    reached = pass.reaches(looked_for);
  }
};

at::Tensor leaf() { return at::ones({2}).requires_grad_(); }

// Runs a backward pass within the backward pass.
struct Twice : torch::autograd::Function<Twice> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& input) {
    return input.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    const c10::AutoGradMode grad(true);
    leaf().sum().backward();
    return gradients;
  }
};

TEST(PassListener, IsToldOfEachPassBeforeItBegins) {
  const auto counter = std::make_shared<Counter>();
  add_pass_listener(counter);
  const at::Tensor parameter = leaf();
  parameter.sum().backward();
  EXPECT_EQ(counter->num_passes, 1);
  Twice::apply(parameter).sum().backward();
  EXPECT_EQ(counter->num_passes, 2) << "a pass within a pass is part of it";
  torch::autograd::grad({parameter.sum()}, {parameter});
  EXPECT_EQ(counter->num_passes, 2) << "adds to no gradient";
  counter->refuses = true;
  const at::Tensor before = parameter.grad().clone();
  EXPECT_THROW(parameter.sum().backward(), std::runtime_error);
  EXPECT_TRUE(at::equal(parameter.grad(), before)) << "the pass has begun";
}

TEST(PassListener, KnowsWhoseGradientsAPassAddsTo) {
  const auto listener = std::make_shared<Counter>();
  add_pass_listener(listener);
  const at::Tensor a = leaf(), b = leaf(), frozen = at::ones({2});
  const auto reaches = [&](const at::Tensor& loss, std::vector<at::Tensor> parameters,
                           const std::vector<at::Tensor>& inputs = {}) {
    listener->looked_for = std::move(parameters);
    torch::autograd::backward({loss}, {}, {}, false, inputs);
    return listener->reached;
  };
  EXPECT_TRUE(reaches((a * 2).exp().sum(), {b, a}));
  EXPECT_FALSE(reaches((a * 2).exp().sum(), {b, frozen, at::Tensor()}));
  EXPECT_FALSE(reaches((a * b.detach()).sum(), {b}));
  EXPECT_TRUE(reaches((a * b).sum(), {b}));
  EXPECT_FALSE(reaches((a * b).sum(), {b}, {a})) << "the pass is for another one's gradient";
  EXPECT_TRUE(reaches((a * b).sum(), {b}, {b}));
  EXPECT_TRUE(reaches(a.sum() + a.exp().sum(), {a})) << "on two ways";
  EXPECT_FALSE(reaches(a.sum(), {}));
}

TEST(PassListener, IsToldOfPassesWithinWhereItWantsTo) {
  const auto listener = std::make_shared<InnerCounter>();
  add_pass_listener(listener);
  Twice::apply(leaf()).sum().backward();
  EXPECT_EQ(listener->num_passes, 1);
  EXPECT_EQ(listener->num_inner, 1);
}

TEST(PassListener, IsNotKeptAlive) {
  auto counter = std::make_shared<Counter>();
  counter->refuses = true;
  add_pass_listener(counter);
  EXPECT_EQ(counter.use_count(), 1);
  counter.reset();
  leaf().sum().backward();
}

// The number that calls made on this thread count under.
std::uint64_t number_of_caller() {
  const device::AsBackwardThread caller;
  return this_thread_number();
}

TEST(BackwardThread, IsKnownToThreadsThatRunThePass) {
  add_pass_listener(std::make_shared<Counter>());
  const std::uint64_t mine = this_thread_number();
  std::uint64_t in_pass = 0, beside = 0, within = 0;
  const at::Tensor hooked = leaf() * 2;
  hooked.register_hook([&](const at::Tensor&) {
    const at::ThreadLocalState state;  // as autograd hands it to its threads for devices
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(state);
      in_pass = number_of_caller();
      const c10::AutoGradMode grad(true);
      const at::Tensor inner = leaf() * 2;
      inner.register_hook([&](const at::Tensor&) { within = number_of_caller(); });
      inner.sum().backward();
    }).join();
    std::thread([&] { beside = number_of_caller(); }).join();
  });
  hooked.sum().backward();
  EXPECT_EQ(in_pass, mine);
  EXPECT_EQ(within, mine);
  EXPECT_NE(beside, mine);
  EXPECT_EQ(number_of_caller(), mine);
}

TEST(BackwardThread, IsKnownToAutogradsThreadForAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  add_pass_listener(std::make_shared<Counter>());
  std::uint64_t own = 0, caller = 0;
  const at::Tensor hooked = leaf().to(at::kCUDA) * 2;
  hooked.register_hook([&](const at::Tensor&) {
    own = this_thread_number();
    caller = number_of_caller();
  });
  hooked.sum().backward();
  EXPECT_EQ(caller, this_thread_number());
  EXPECT_NE(own, caller) << "LibTorch runs the pass on this thread: the test tests nothing";
}

// Python has another engine than LibTorch's own, in which passes still run.
struct Foreign : torch::autograd::Engine {
  static Engine& instance() {
    static auto* const engine = new Foreign;
    return *engine;
  }
  static inline int num_passes = 0;
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++num_passes;
    return get_base_engine().execute(roots, inputs, keep_graph, create_graph, accumulate_grad,
                                     outputs);
  }
};

TEST(PassListenerDeathTest, LeavesAnEngineOfSomebodyElsesInPlace) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto run = [] {
    torch::autograd::set_default_engine_stub(&Foreign::instance);
    const auto counter = std::make_shared<Counter>();
    add_pass_listener(counter);
    leaf().sum().backward();
    return counter->num_passes == 1 && Foreign::num_passes == 1;
  };
  EXPECT_EXIT(std::_Exit(run() ? 0 : 1), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace lockstep::intercept
