#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/distributed/distributed.h>

namespace lockstep {
namespace {

bool is_registered(const char* name, const char* overload) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, overload)
      .hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA);
}

// One test for both, because the operators stay registered until the process ends.
TEST(UnderAutocast, OperatorsAreForGpusAloneAndMayBeLeftOut) {
  const auto none = setup_distributed({.autocast_operators = false});
  EXPECT_FALSE(is_registered("aten::add_", "Tensor"));
  EXPECT_FALSE(is_registered("aten::cross_entropy_loss", ""));
  const auto dist = setup_distributed({});
  const bool on_gpu = dist.device().is_cuda();
  EXPECT_EQ(is_registered("aten::add_", "Tensor"), on_gpu);
  EXPECT_EQ(is_registered("aten::cross_entropy_loss", ""), on_gpu);
  if (!on_gpu) return;

  // Whole parameters and parts of them give the same result, which is close to that of floats.
  const auto make = [] {
    torch::manual_seed(1);
    return torch::nn::Sequential(torch::nn::Linear(16, 64), torch::nn::Linear(64, 520));
  };
  torch::manual_seed(2);
  const at::Tensor x = at::randn({3, 5, 16}).cuda(),
                   targets = at::randint(520, {15}, at::kLong).cuda();
  const auto loss_of = [&](torch::nn::Sequential& model) {
    return torch::nn::functional::cross_entropy(model->forward(x).flatten(0, 1), targets);
  };
  auto in_floats = make();
  in_floats->to(at::kCUDA);
  loss_of(in_floats).backward();
  std::vector<at::Tensor> expected, of_whole;
  for (const at::Tensor& parameter : in_floats->parameters())
    expected.push_back(parameter.grad().cpu());
  for (const auto mode : {ParallelMode::DDP, ParallelMode::FSDP}) {
    auto job = setup_distributed({.mode = mode});
    auto model = job.wrap_model(make());
    at::Tensor loss;
    {
      const autocast bf16(at::kCUDA, at::kBFloat16);
      loss = loss_of(model);
    }
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const auto& item : model->named_parameters())
      gradients.push_back(job.full_gradient(model, item.key()).cpu());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double largest = expected[i].abs().max().item<double>();
      EXPECT_LE((gradients[i] - expected[i]).abs().max().item<double>(), 3e-2 * largest) << i;
    }
    if (mode == ParallelMode::DDP) of_whole = gradients;
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(gradients[i].equal(of_whole[i]));
  }
}

}  // namespace
}  // namespace lockstep
