// Recomputation with everything on a GPU, after a backward pass that LibTorch's own engine has run.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/dropout.h>
#include <torch/utils.h>

#include <lockstep/recompute/offload_activations.h>
#include <lockstep/recompute/recompute.h>

namespace lockstep {
namespace {

class RecomputeOnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
    torch::manual_seed(5);
    weight_ = at::randn({16, 16}, at::kCUDA).requires_grad_();
    input_ = at::randn({4, 16}, at::kCUDA);
  }

  static at::Tensor block(const at::Tensor& hidden, const at::Tensor& weight) {
    return torch::nn::functional::dropout(at::gelu(hidden.matmul(weight)));
  }

  template <typename Layer>
  at::Tensor gradient_of(const Layer& layer) {
    torch::manual_seed(7);
    weight_.mutable_grad() = at::Tensor();
    at::Tensor hidden = input_;
    for (int i = 0; i < 3; ++i) hidden = layer(hidden);
    hidden.pow(2).mean().backward();
    return weight_.grad().clone();
  }

  at::Tensor plain() {
    return gradient_of([&](const at::Tensor& hidden) { return block(hidden, weight_); });
  }

  at::Tensor weight_;
  at::Tensor input_;
};

TEST_F(RecomputeOnGpu, HasTheBitsOfAPlainRun) {
  const at::Tensor wanted = plain();
  for (int run = 0; run < 2; ++run)
    EXPECT_TRUE(at::equal(gradient_of([&](const at::Tensor& hidden) {
                            return recompute(&RecomputeOnGpu::block, hidden, weight_);
                          }),
                          wanted));
  EXPECT_TRUE(at::equal(plain(), wanted));
}

TEST_F(RecomputeOnGpu, OffloadsWhatIsSaved) {
  const at::Tensor wanted = plain();
  const at::Tensor got = [&] {
    const OffloadActivations offload;
    return gradient_of([&](const at::Tensor& hidden) { return block(hidden, weight_); });
  }();
  EXPECT_TRUE(at::equal(got, wanted));
}

}  // namespace
}  // namespace lockstep
