#include <lockstep/intercept/backward.h>

#include <stdexcept>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

namespace lockstep::intercept {
namespace {

struct Counter : PassListener {
  int num_passes = 0;
  bool refuses = false;
  void before_pass() override {
    ++num_passes;
    if (refuses) throw std::runtime_error("not this pass");
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

TEST(PassListener, IsNotKeptAlive) {
  auto counter = std::make_shared<Counter>();
  counter->refuses = true;
  add_pass_listener(counter);
  EXPECT_EQ(counter.use_count(), 1);
  counter.reset();
  leaf().sum().backward();
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
