#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/plan/measured/trace_step.h>

#include "tests/base/errors.h"

namespace lockstep::plan {
namespace {

using ::testing::HasSubstr;

struct Net : torch::nn::Module {
  torch::nn::Sequential layers;
  Net() : layers(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 4)) {
    register_module("layers", layers);
  }
  at::Tensor loss() { return layers->forward(at::ones({3, 4})).sum(); }
};

TEST(TraceStep, LeavesTheModuleAsItWas) {
  Net net;
  net.loss().backward();
  std::vector<at::Tensor> before, gradients;
  for (const auto& parameter : net.parameters()) gradients.push_back(parameter.grad().clone());
  for (const auto& buffer : net.buffers()) before.push_back(buffer.clone());
  trace_step(net, [&] { return net.loss(); });
  const auto parameters = net.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_TRUE(at::equal(parameters[i].grad(), gradients[i]));
    EXPECT_FALSE(intercept::is_tagged(parameters[i]));
  }
  const auto buffers = net.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) EXPECT_TRUE(at::equal(buffers[i], before[i]));
  // The model can be used as before.
  net.loss().backward();
  EXPECT_TRUE(at::allclose(parameters.front().grad(), 2 * gradients.front()));
}

TEST(TraceStep, LeavesItAsItWasWhenTheLossThrows) {
  Net net;
  net.loss().backward();
  const at::Tensor gradient = net.parameters().front().grad().clone();
  EXPECT_THROW(trace_step(net,
                          [&]() -> at::Tensor {
                            net.loss();
                            throw std::runtime_error("not today");
                          }),
               std::runtime_error);
  EXPECT_TRUE(at::equal(net.parameters().front().grad(), gradient));
  EXPECT_FALSE(intercept::is_tagged(net.parameters().front()));
}

TEST(TraceStep, HearsOfEveryParameter) {
  Net net;
  const StepTrace trace = trace_step(net, [&] { return net.loss(); });
  const std::size_t count = net.parameters().size();
  std::vector<int> used(count), came(count);
  for (const StepTrace::Event& event : trace.events)
    ++(event.kind == StepTrace::Kind::use ? used : came).at(event.parameter);
  for (std::size_t i = 0; i < count; ++i) {
    EXPECT_GE(used[i], 1) << i;
    EXPECT_EQ(came[i], 1) << i;
  }
}

TEST(TraceStep, RefusesWhatCannotBeTrained) {
  Net net;
  const auto message = [&](const std::function<at::Tensor()>& loss) {
    return usage_error([&] { trace_step(net, loss); });
  };
  EXPECT_THAT(message([] { return at::ones({}); }), HasSubstr("depends on parameters"));
  EXPECT_THAT(message([&] {
                return net.layers->forward(at::ones({3, 4}));
              }),
              HasSubstr("no number"));
  for (at::Tensor& parameter : net.parameters()) parameter.requires_grad_(false);
  EXPECT_THAT(message([&] { return net.loss(); }), HasSubstr("nothing to train"));
}

TEST(EstimateMemory, OfAModuleInOneCall) {
  Net net;
  const auto estimate = estimate_memory(net, [&] { return net.loss(); },
                                        {.strategy = ShardingStrategy::FULL_SHARD, .num_ranks = 2});
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : net.parameters()) elements += parameter.numel();
  EXPECT_GE(estimate.optimizer, 8 * elements / 2);
  EXPECT_GT(estimate.activations, 0);
  EXPECT_GT(estimate.buffers, 0);
  EXPECT_GT(estimate.peak, estimate.weights + estimate.optimizer);
}

}  // namespace
}  // namespace lockstep::plan
