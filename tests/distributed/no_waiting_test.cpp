#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/distributed/distributed.h>
#include <lockstep/nn/layers/dropout.h>
#include <tests/ranks/no_waiting.h>

namespace lockstep {
namespace {

#if defined(LOCKSTEP_HAVE_CUDA)
void expect_steps_without_waiting(ShardingStrategy strategy) {
  auto dist = setup_distributed({.mode = ParallelMode::FSDP, .sharding_strategy = strategy});
  auto model =
      dist.wrap_model(torch::nn::Sequential(torch::nn::Linear(32, 64), torch::nn::BatchNorm1d(64),
                                            torch::nn::ReLU(), torch::nn::Linear(64, 8)));
  const auto optimizer = dist.make_optimizer(model, optim::AdamWOptions{});
  const at::Tensor x = at::randn({16, 32}).cuda();
  const auto step = [&] {
    optimizer->zero_grad();
    model->forward(x).square().mean().backward();
    optimizer->step(1e-3);
  };
  // The first passes agree on an order, and compare the ranks.
  for (int i = 0; i < 3; ++i) step();
  const ranks::NoWaiting no_waiting;
  ASSERT_TRUE(no_waiting.notices());
  for (int i = 0; i < 5; ++i) EXPECT_NO_THROW(step());
}
#endif

// One rank has no messages: with several, a thread of the transport waits for data to send.
TEST(OnGpu, StepsOfNoStrategyWait) {
#if defined(LOCKSTEP_HAVE_CUDA)
  for (const auto strategy : {ShardingStrategy::NO_SHARD, ShardingStrategy::SHARD_OPTIMIZER,
                              ShardingStrategy::SHARD_GRAD_OP, ShardingStrategy::FULL_SHARD}) {
    SCOPED_TRACE(name_of(strategy));
    expect_steps_without_waiting(strategy);
  }
#else
  GTEST_SKIP() << "built without CUDA";
#endif
}

TEST(OnGpu, MasksOfDropoutDoNotWait) {
#if defined(LOCKSTEP_HAVE_CUDA)
  const ranks::NoWaiting no_waiting;
  ASSERT_TRUE(no_waiting.notices());
  EXPECT_NO_THROW(nn::dropout_mask({4, 8}, {0, 1, 2, 3}, /*key=*/7, 0.5, at::kCUDA, {}));
#else
  GTEST_SKIP() << "built without CUDA";
#endif
}

}  // namespace
}  // namespace lockstep
