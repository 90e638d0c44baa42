#include <lockstep/device/autocast.h>

#include <optional>
#include <stdexcept>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/version.h>

#include "../base/errors.h"

namespace lockstep::device {
namespace {

using ::testing::HasSubstr;

at::ScalarType product_type() { return at::mm(at::ones({2, 3}), at::ones({3, 2})).scalar_type(); }

TEST(Autocast, ComputesInSixteenBitsWhileItLives) {
  EXPECT_EQ(product_type(), at::kFloat);
  {
    const Autocast bf16(at::kCPU, at::kBFloat16);
    EXPECT_EQ(product_type(), at::kBFloat16);
  }
  EXPECT_EQ(product_type(), at::kFloat);
}

TEST(Autocast, GradientsAreOfTheWeightsOwnType) {
  const at::Tensor weight = at::ones({3, 2}).set_requires_grad(true);
  at::Tensor loss;
  {
    const Autocast bf16(at::kCPU, at::kBFloat16);
    loss = at::mm(at::ones({2, 3}), weight).to(at::kFloat).sum();
  }
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(weight.grad(), at::full({3, 2}, 2.0)));
}

TEST(Autocast, NestsAndIsPutBack) {
  const Autocast outer(at::kCPU, at::kBFloat16);
  {
    const Autocast inner = Autocast::off(at::kCPU);
    EXPECT_EQ(product_type(), at::kFloat);
    {
      const Autocast innermost(at::kCPU, at::kBFloat16);
      EXPECT_EQ(product_type(), at::kBFloat16);
    }
    EXPECT_EQ(product_type(), at::kFloat);
  }
  EXPECT_EQ(product_type(), at::kBFloat16);
}

// The setting for CUDA can be read without a CUDA device.
TEST(Autocast, TheTypeIsPutBackToo) {
  const auto before = Autocast::active(at::kCUDA);
  EXPECT_EQ(before, std::nullopt);
  {
    const Autocast outer(at::kCUDA, at::kBFloat16);
    EXPECT_EQ(Autocast::active(at::kCUDA), at::kBFloat16);
    {
      const Autocast inner(at::kCUDA, at::kHalf);
      EXPECT_EQ(Autocast::active(at::kCUDA), at::kHalf);
      EXPECT_EQ(Autocast::active(at::kCPU), std::nullopt);
      EXPECT_EQ(product_type(), at::kFloat);
    }
    EXPECT_EQ(Autocast::active(at::kCUDA), at::kBFloat16);
  }
  EXPECT_EQ(Autocast::active(at::kCUDA), std::nullopt);
}

TEST(Autocast, AnErrorPutsItBack) {
  try {
    const Autocast bf16(at::kCPU, at::kBFloat16);
    throw std::runtime_error("in a model");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(product_type(), at::kFloat);
}

TEST(Autocast, IsOfOneThread) {
  const Autocast bf16(at::kCPU, at::kBFloat16);
  at::ScalarType elsewhere = at::kByte;
  std::thread([&] { elsewhere = product_type(); }).join();
  EXPECT_EQ(elsewhere, at::kFloat);
}

// A weight is changed while its cast is kept; products show which of the two was used.
class CachedWeight : public ::testing::Test {
 protected:
  float product() const { return at::mm(at::ones({1, 1}), weight_).to(at::kFloat).item<float>(); }
  void change_to(float value) {
    const c10::NoGradGuard no_grad;
    weight_.fill_(value);
  }

  at::Tensor weight_ = at::ones({1, 1}).set_requires_grad(true);
};

TEST_F(CachedWeight, IsKeptUntilTheOutermostEnds) {
  {
    const Autocast outer(at::kCPU, at::kBFloat16);
    {
      const Autocast inner(at::kCPU, at::kBFloat16);
      EXPECT_EQ(product(), 1);
    }
    change_to(2);
    EXPECT_EQ(product(), 1);
  }
  const Autocast next(at::kCPU, at::kBFloat16);
  EXPECT_EQ(product(), 2);
}

TEST_F(CachedWeight, IsCastAnewWithoutACache) {
  {
    const Autocast uncached(at::kCPU, at::kBFloat16, CastCache::unused);
    EXPECT_EQ(product(), 1);
    change_to(2);
    EXPECT_EQ(product(), 2);
  }
  // The next object uses the cache again.
  const Autocast cached(at::kCPU, at::kBFloat16);
  EXPECT_EQ(product(), 2);
  change_to(3);
  EXPECT_EQ(product(), 2);
}

TEST(Autocast, Refusals) {
  EXPECT_THAT(usage_error([] { Autocast wrong(at::kCPU, at::kFloat); }), HasSubstr("Float"));
  EXPECT_THAT(usage_error([] { Autocast wrong(at::kMeta, at::kHalf); }), HasSubstr("meta"));
  EXPECT_THAT(usage_error([] { const Autocast wrong = Autocast::off(at::kMeta); }),
              HasSubstr("meta"));
  EXPECT_EQ(Autocast::active(at::kMeta), std::nullopt);
  EXPECT_EQ(Autocast::active(at::kCPU), std::nullopt);
}

TEST(Autocast, HalfOnCpusWhereLibTorchHasIt) {
#if TORCH_VERSION_MAJOR < 2
  EXPECT_THAT(usage_error([] { Autocast half(at::kCPU, at::kHalf); }), HasSubstr("BFloat16"));
#else
  const Autocast half(at::kCPU, at::kHalf);
  EXPECT_EQ(product_type(), at::kHalf);
#endif
}

}  // namespace
}  // namespace lockstep::device
