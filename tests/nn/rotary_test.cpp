#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/nn/context_parallel/sequence_split.h>
#include <lockstep/nn/layers/rotary.h>

#include "../base/errors.h"

namespace lockstep::nn {
namespace {

TEST(Rotary, TurnsPairsByTheirPosition) {
  Rotary rotary(6, 20, 100.0);
  const auto x = at::randn({2, 3, 4, 6});
  const auto y = rotary.apply(x, 5);
  for (std::int64_t t = 0; t < 4; ++t)
    for (std::int64_t i = 0; i < 3; ++i) {
      const double angle =
          static_cast<double>(5 + t) * std::pow(100.0, -static_cast<double>(i) / 3);
      const auto a = x[1][2][t][i].item<double>();
      const auto b = x[1][2][t][i + 3].item<double>();
      EXPECT_NEAR(y[1][2][t][i].item<double>(), a * std::cos(angle) - b * std::sin(angle), 1e-5);
      EXPECT_NEAR(y[1][2][t][i + 3].item<double>(), b * std::cos(angle) + a * std::sin(angle),
                  1e-5);
    }
}

// The purpose of rotary positions: products of queries and keys depend only on their distance.
TEST(Rotary, ProductsDependOnDistance) {
  Rotary rotary(8, 100, 10000.0);
  const auto q = at::randn({1, 1, 1, 8});
  const auto k = at::randn({1, 1, 1, 8});
  const auto product = [&](std::int64_t at_q, std::int64_t at_k) {
    return rotary.apply(q, at_q).mul(rotary.apply(k, at_k)).sum().item<double>();
  };
  EXPECT_NEAR(product(10, 3), product(97, 90), 1e-4);
  EXPECT_GT(std::abs(product(10, 3) - product(10, 9)), 1e-3);
}

TEST(Rotary, GradientTurnsBack) {
  Rotary rotary(8, 16, 10000.0);
  auto x = at::randn({1, 2, 5, 8}).requires_grad_();
  const auto y = rotary.apply(x, 3);
  const auto g = at::randn_like(y);
  y.backward(g);
  // A turn keeps lengths, so turning the gradient forward again gives the original.
  EXPECT_TRUE(rotary.apply(x.grad(), 3).allclose(g, 1e-5, 1e-5));
  EXPECT_FALSE(x.grad().allclose(g, 1e-2, 1e-2));
}

TEST(Rotary, OfAPartIsThatPartOfTheWhole) {
  Rotary rotary(6, 40, 100.0);
  const auto x = at::randn({2, 3, 24, 6});
  const auto whole = rotary.apply(x);
  for (const auto kind : {SplitKind::contiguous, SplitKind::zigzag})
    for (int rank = 0; rank < 3; ++rank) {
      const SequencePart part{.rank = rank, .size = 3, .kind = kind};
      auto mine = take_part(x, 2, part).detach().requires_grad_();
      const auto y = rotary.apply(mine, positions(24, part));
      EXPECT_TRUE(y.equal(take_part(whole, 2, part))) << name(kind) << ' ' << rank;
      y.backward(take_part(whole, 2, part));
      EXPECT_TRUE(mine.grad().allclose(mine, 1e-5, 1e-5));
    }
}

TEST(Rotary, RefusesWhatItHasNoAnglesFor) {
  usage_error([] { Rotary(5, 10, 10000.0); });
  Rotary rotary(4, 10, 10000.0);
  const auto message = usage_error([&] { rotary.apply(at::ones({1, 1, 3, 4}), 8); });
  EXPECT_NE(message.find("8 to 10"), std::string::npos) << message;
  EXPECT_NE(message.find("10 positions"), std::string::npos) << message;
  const std::vector<mesh::Interval> seven = {{0, 3}, {5, 9}};
  const auto other = usage_error([&] { rotary.apply(at::ones({1, 1, 6, 4}), seven); });
  EXPECT_NE(other.find("7 tokens, and there are 6"), std::string::npos) << other;
}

}  // namespace
}  // namespace lockstep::nn
