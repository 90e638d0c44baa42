#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/model_parallel.h>

namespace lockstep::pipeline {
namespace {

namespace nn = torch::nn;

nn::Sequential four_layers() {
  torch::manual_seed(1);
  return nn::Sequential(nn::Linear(4, 32), nn::ReLU(nn::ReLUOptions().inplace(true)),
                        nn::Linear(32, 8), nn::Linear(8, 2));
}

void expect_as_on_one(const std::vector<c10::Device>& devices, double tolerance) {
  nn::Sequential whole = four_layers();
  ModelParallel model(four_layers(), devices);
  const at::Tensor input = at::ones({3, 4});
  whole->forward(input).square().sum().backward();
  const at::Tensor output = model->forward(input);
  EXPECT_EQ(output.device().type(), devices.back().type());
  output.square().sum().backward();
  const auto parameters = model->named_parameters();
  ASSERT_EQ(parameters.size(), whole->named_parameters().size());
  for (const auto& item : whole->named_parameters())
    EXPECT_TRUE(at::allclose(parameters[item.key()].grad().cpu(), item.value().grad(), tolerance,
                             tolerance))
        << item.key();
}

std::string refused(const nn::Sequential& layers, const std::vector<c10::Device>& devices,
                    const Cuts& cuts = {}) {
  try {
    ModelParallel model(layers, devices, cuts);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(ModelParallel, HasTheGradientsOfOneDevice) {
  expect_as_on_one({at::kCPU}, 0);
  expect_as_on_one({at::kCPU, at::kCPU, at::kCPU}, 0);
}

TEST(ModelParallel, MovesActivationsBetweenDevices) {
  if (!at::hasCUDA()) GTEST_SKIP() << "this machine has no GPU";
  const c10::Device gpu(at::kCUDA, 0);
  // Products on that device may be in TF32.
  constexpr double kRounding = 1e-2;
  expect_as_on_one({gpu, at::kCPU}, kRounding);
  expect_as_on_one({at::kCPU, gpu, at::kCPU}, kRounding);
}

TEST(ModelParallel, CutsByParametersOrWhereItIsSaid) {
  const std::vector<c10::Device> devices(2, at::kCPU);
  EXPECT_EQ(ModelParallel(four_layers(), devices)->cuts(), (Cuts{0, 2, 4}));
  EXPECT_EQ(ModelParallel(four_layers(), devices, Cuts{0, 3, 4})->cuts(), (Cuts{0, 3, 4}));
}

TEST(ModelParallel, RefusesWhatCannotBe) {
  const std::vector<c10::Device> devices(5, at::kCPU);
  EXPECT_NE(refused(four_layers(), devices).find("4 blocks cannot be cut into 5 stages"),
            std::string::npos);
  EXPECT_NE(refused(four_layers(), {at::kCPU, at::kCPU}, {0, 4}).find("does not cut 4 blocks"),
            std::string::npos);
  nn::Linear shared(2, 2);
  const nn::Sequential twice(shared, nn::Tanh(), shared);
  EXPECT_NE(refused(twice, {at::kCPU, at::kMeta}).find("is also a parameter of a layer on cpu"),
            std::string::npos);
}

}  // namespace
}  // namespace lockstep::pipeline
