// The two halves with everything on a GPU, for which autograd has a thread of its own.
#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn.h>

#include <lockstep/device/autocast.h>

#include "two_halves.h"

namespace lockstep::pipeline {
namespace {

namespace nn = torch::nn;

class SplitOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  }

  static nn::Sequential network() {
    nn::Sequential model(nn::Conv2d(nn::Conv2dOptions(3, 8, 3)), nn::BatchNorm2d(8), nn::ReLU(),
                         nn::Conv2d(nn::Conv2dOptions(8, 4, 3).bias(false)),
                         nn::Flatten(nn::FlattenOptions().start_dim(2)),
                         nn::LayerNorm(nn::LayerNormOptions({64})), nn::Linear(64, 32),
                         nn::Dropout(0.2), nn::Linear(nn::LinearOptions(32, 16).bias(false)));
    model->to(at::kCUDA);
    return model;
  }

  static Case<nn::SequentialImpl> of_network() {
    return {[] { return network().ptr(); },
            [] {
              return at::randn({4, 3, 12, 12}, at::kCUDA).requires_grad_();
            },
            [](nn::SequentialImpl& model, const at::Tensor& x) { return model.forward(x); }};
  }
};

TEST_F(SplitOnGpu, HasTheBitsOfAWholePass) { expect_halves_make_a_whole(of_network()); }

// Casts of weights are between the products and the parameters, and one cast serves several
// products.
TEST_F(SplitOnGpu, HasTheBitsOfAWholePassUnderAutocast) {
  auto given = of_network();
  given.loss = [](nn::SequentialImpl& model, const at::Tensor& x) {
    const device::Autocast bf16(at::kCUDA, at::kBFloat16);
    return model.forward(x);
  };
  expect_halves_make_a_whole(given);
}

// Each half computes on the stream of forward.
TEST_F(SplitOnGpu, HasTheBitsOfAWholePassOnAnotherStream) {
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  const auto main = cuda.getStream(c10::Device(at::kCUDA, 0));
  const auto side = cuda.getStreamFromGlobalPool(c10::Device(at::kCUDA, 0));
  auto given = of_network();
  given.loss = [=](nn::SequentialImpl& model, const at::Tensor& x) {
    main.synchronize();
    at::Tensor output;
    {
      const c10::StreamGuard on(side);
      output = model.forward(x);
    }
    side.synchronize();
    return output;
  };
  expect_halves_make_a_whole(given);
}

}  // namespace
}  // namespace lockstep::pipeline
