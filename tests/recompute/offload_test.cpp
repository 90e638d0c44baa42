#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <lockstep/device/live_bytes.h>
#include <lockstep/recompute/offload_activations.h>
#include <lockstep/recompute/recompute.h>
#include <lockstep/recompute/saved_tensor.h>

#include "../base/errors.h"
#include "expect_equal.h"

namespace lockstep {
namespace {

using activations::HostCopies;
using activations::View;

TEST(HostCopy, GivesViewsBackAsTheyLay) {
  const auto base = at::randn({6, 10});
  const std::vector<at::Tensor> views = {base, base.t(), base.slice(1, 2, 9, 3), base[4],
                                         base.select(1, 3).unsqueeze(1).expand({6, 4})};
  HostCopies copies;
  for (const auto& view : views) {
    const auto copy = copies.of(view);
    EXPECT_EQ(copy, copies.of(base));
    const auto back = copy->back(View(view));
    EXPECT_TRUE(back.equal(view));
    EXPECT_EQ(back.strides(), view.strides());
    EXPECT_EQ(back.scalar_type(), view.scalar_type());
    EXPECT_FALSE(back.is_alias_of(view));
  }
}

TEST(HostCopy, SharesWhatItGivesBack) {
  const auto base = at::randn({6, 10});
  HostCopies copies;
  const auto copy = copies.of(base);
  const auto first = copy->back(View(base));
  EXPECT_TRUE(first.is_alias_of(copy->back(View(base.t()))));
}

TEST(HostCopy, IsMadeAnewOfMemoryThatWasWrittenTo) {
  auto tensor = at::zeros({5});
  HostCopies copies;
  const auto before = copies.of(tensor);
  tensor.add_(1);
  const auto after = copies.of(tensor);
  EXPECT_TRUE(before->back(View(tensor)).equal(at::zeros({5})));
  EXPECT_TRUE(after->back(View(tensor)).equal(at::ones({5})));
}

TEST(HostCopy, IsOfTheStorageThatIsThereNow) {
  HostCopies copies;
  std::vector<std::shared_ptr<activations::HostCopy>> kept;
  // The allocator tends to return the same address again.
  for (int i = 0; i < 20; ++i) {
    const auto tensor = at::full({1000}, i);
    kept.push_back(copies.of(tensor));
    EXPECT_TRUE(kept.back()->back(View(tensor)).eq(i).all().item<bool>()) << i;
  }
}

// Computes gradients of a model and its input, with or without offload.
class Subject {
 public:
  explicit Subject(const at::Device& device) : device_(device) {}

  template <typename Forward>
  std::vector<at::Tensor> gradients(const Forward& forward) const {
    at::manual_seed(5);
    torch::nn::Sequential model(torch::nn::Linear(64, 256), torch::nn::Dropout(0.2),
                                torch::nn::Linear(256, 64));
    model->to(device_);
    const auto x = at::randn({512, 64}).to(device_).requires_grad_();
    forward(model, x).square().sum().backward();
    auto found = model->parameters();
    for (auto& parameter : found) parameter = parameter.grad();
    found.push_back(x.grad());
    return found;
  }

 private:
  at::Device device_;
};

std::vector<at::Device> devices() {
  std::vector<at::Device> devices = {at::kCPU};
  if (at::hasCUDA()) devices.emplace_back(at::kCUDA, 0);
  return devices;
}

TEST(OffloadActivations, HasTheBitsOfAPlainRun) {
  const auto forward = [](torch::nn::Sequential model, const at::Tensor& x) {
    return model->forward(x.sin()).tanh();
  };
  for (const auto& device : devices()) {
    const Subject subject(device);
    expect_equal(subject.gradients(forward), subject.gradients([&](auto model, const auto& x) {
      const OffloadActivations offload({.min_bytes = 0});
      return forward(model, x);
    }));
  }
}

TEST(OffloadActivations, NestsWithRecomputation) {
  const auto plain = [](torch::nn::Sequential model, const at::Tensor& x) {
    return model->forward(x.sin()).tanh();
  };
  for (const auto& device : devices()) {
    const Subject subject(device);
    const auto expected = subject.gradients(plain);
    expect_equal(expected, subject.gradients([&](auto model, const auto& x) {
      const OffloadActivations offload({.min_bytes = 0});
      return recompute(model, x.sin()).tanh();
    }));
    expect_equal(expected, subject.gradients([&](auto model, const auto& x) {
      auto within = [=](const at::Tensor& x) mutable {
        const OffloadActivations offload({.min_bytes = 0});
        return model->forward(x.sin());
      };
      return recompute(within, x).tanh();
    }));
  }
}

TEST(OffloadActivations, CopiesNothingOnACpu) {
  const auto bytes = [](bool offloaded) {
    const auto x = at::randn({512, 64}).requires_grad_();
    const device::LiveBytes memory(at::kCPU);
    std::optional<OffloadActivations> offload;
    if (offloaded) offload.emplace(OffloadOptions{.min_bytes = 0});
    const auto y = x.sin().exp().tanh();
    return memory.peak();
  };
  EXPECT_EQ(bytes(true), bytes(false));
}

TEST(OffloadActivations, FreesTheMemoryOfAGpu) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  const auto bytes = [](bool offloaded) {
    const auto x = at::randn({512, 64}).to(at::kCUDA).requires_grad_();
    const device::LiveBytes memory(x.device());
    std::optional<OffloadActivations> offload;
    if (offloaded) offload.emplace(OffloadOptions{.min_bytes = 0});
    const auto y = x.sin().exp().tanh().sum();
    return memory.now();
  };
  EXPECT_LT(bytes(true), bytes(false));
}

TEST(OffloadActivations, RefusesATensorThatIsChangedBeforeBackward) {
  const auto x = at::randn({5}).requires_grad_();
  at::Tensor y, z;
  {
    const OffloadActivations offload;
    y = x.sin();
    z = y.cos();
  }
  y.add_(1);
  const auto text = usage_error([&] { z.sum().backward(); });
  EXPECT_NE(text.find("changed in place"), std::string::npos) << text;
}

TEST(OffloadActivations, EndsWithItsScope) {
  const auto x = at::randn({5}).requires_grad_();
  at::Tensor y, z;
  { const OffloadActivations offload; }
  y = x.sin();
  z = y.cos();
  y.add_(1);
  // This is autograd's own error.
  EXPECT_THROW(z.sum().backward(), c10::Error);
}

}  // namespace
}  // namespace lockstep
