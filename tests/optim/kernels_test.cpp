// The loops by themselves, compared with arithmetic that is written out, and cut at odd places.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/philox.h>
#include <lockstep/optim/adamw/plain/kernel.h>
#include <lockstep/optim/kernels/gradients.h>
#include <lockstep/optim/sgd/plain/kernel.h>

namespace lockstep::optim {
namespace {

// Numbers in [-scale, scale).
template <typename T>
std::vector<T> values(std::size_t count, std::uint64_t key, T scale = 1) {
  std::vector<T> result(count);
  for (std::size_t i = 0; i < count; ++i)
    result[i] = scale * (2 * static_cast<T>(Philox::uniform(Philox::words(key, i)[0])) - 1);
  return result;
}

template <typename T>
std::vector<T> squares(std::size_t count, std::uint64_t key) {
  std::vector<T> result = values<T>(count, key);
  for (T& value : result) value *= value;
  return result;
}

template <typename T>
AdamStep<T> adam_step() {
  return {.beta1 = T(0.9),
          .beta2 = T(0.95),
          .one_minus_beta1 = T(1 - 0.9),
          .one_minus_beta2 = T(1 - 0.95),
          .eps = T(1e-8),
          .step_size = T(1e-3),
          .root_correction = T(1.5),
          .keep = T(1 - 1e-4),
          .coupled_decay = T(0.01)};
}

// Lengths that leave every remainder of a vector's width.
const std::vector<std::int64_t> kOddPieces = {1, 2, 3, 7, 13, 16, 31, 33, 64, 100, 255, 999};

template <typename Update>
void in_odd_pieces(std::int64_t count, const Update& update) {
  std::int64_t begin = 0;
  for (std::size_t piece = 0; begin < count; ++piece) {
    const std::int64_t length = std::min(kOddPieces[piece % kOddPieces.size()], count - begin);
    update(begin, length);
    begin += length;
  }
}

template <typename T>
class Kernels : public ::testing::Test {};
using Types = ::testing::Types<float, double>;
TYPED_TEST_SUITE(Kernels, Types);

TYPED_TEST(Kernels, AdamIsTheFormula) {
  using T = TypeParam;
  const std::size_t count = 1003;
  const auto step = adam_step<T>();
  const auto w = values<T>(count, 1);
  const auto g = values<T>(count, 2);
  const auto m = values<T>(count, 3);
  const auto v = squares<T>(count, 4);
  auto new_w = w;
  auto new_m = m;
  auto new_v = v;
  adam_update(step, static_cast<std::int64_t>(count), new_w.data(), g.data(), new_m.data(),
              new_v.data());
  const double tolerance = 8 * static_cast<double>(std::numeric_limits<T>::epsilon());
  for (std::size_t i = 0; i < count; ++i) {
    const double gi = double{g[i]} + double{step.coupled_decay} * double{w[i]};
    const double mi = double{step.beta1} * double{m[i]} + double{step.one_minus_beta1} * gi;
    const double vi = double{step.beta2} * double{v[i]} + double{step.one_minus_beta2} * gi * gi;
    const double wi = double{step.keep} * double{w[i]} -
                      double{step.step_size} * mi /
                          (std::sqrt(vi) * double{step.root_correction} + double{step.eps});
    EXPECT_NEAR(new_m[i], mi, tolerance);
    EXPECT_NEAR(new_v[i], vi, tolerance);
    EXPECT_NEAR(new_w[i], wi, tolerance);
  }
}

TYPED_TEST(Kernels, AdamsBitsDoNotDependOnTheCut) {
  using T = TypeParam;
  const std::size_t count = 10007;
  const auto g = values<T>(count, 2);
  auto w = values<T>(count, 1);
  auto m = values<T>(count, 3);
  auto v = squares<T>(count, 4);
  auto cut_w = w;
  auto cut_m = m;
  auto cut_v = v;
  adam_update(adam_step<T>(), static_cast<std::int64_t>(count), w.data(), g.data(), m.data(),
              v.data());
  in_odd_pieces(static_cast<std::int64_t>(count), [&](std::int64_t begin, std::int64_t length) {
    adam_update(adam_step<T>(), length, cut_w.data() + begin, g.data() + begin,
                cut_m.data() + begin, cut_v.data() + begin);
  });
  EXPECT_EQ(w, cut_w);
  EXPECT_EQ(m, cut_m);
  EXPECT_EQ(v, cut_v);
}

TYPED_TEST(Kernels, SgdsBitsDoNotDependOnTheCut) {
  using T = TypeParam;
  const std::size_t count = 10007;
  const SgdStep<T> step{.learning_rate = T(0.1),
                        .weight_decay = T(0.01),
                        .momentum = T(0.9),
                        .gradient_share = T(0.7),
                        .nesterov = true};
  const auto g = values<T>(count, 2);
  auto w = values<T>(count, 1);
  auto b = values<T>(count, 3);
  auto cut_w = w;
  auto cut_b = b;
  sgd_update(step, static_cast<std::int64_t>(count), w.data(), g.data(), b.data());
  in_odd_pieces(static_cast<std::int64_t>(count), [&](std::int64_t begin, std::int64_t length) {
    sgd_update(step, length, cut_w.data() + begin, g.data() + begin, cut_b.data() + begin);
  });
  EXPECT_EQ(w, cut_w);
  EXPECT_EQ(b, cut_b);
}

// The order of addition is part of the contract, because a GPU has to follow it.
TYPED_TEST(Kernels, SumOfSquaresFoldsInHalves) {
  using T = TypeParam;
  for (const std::int64_t count : {0, 1, 2, 1000, 2047, 2048, 2049, 3000, 4095, 4096}) {
    const auto x = values<T>(static_cast<std::size_t>(count), 5, T(100));
    std::vector<double> folded(static_cast<std::size_t>(kNormBlock), 0.0);
    for (std::size_t i = 0; i < x.size(); ++i) folded[i] = double{x[i]} * double{x[i]};
    for (std::size_t width = folded.size() / 2; width > 0; width /= 2)
      for (std::size_t i = 0; i < width; ++i) folded[i] += folded[i + width];
    EXPECT_EQ(sum_of_squares(x.data(), count), folded[0]) << count;
  }
}

TYPED_TEST(Kernels, SumOfSquaresOfWhatIsNotFiniteIsNotFinite) {
  using T = TypeParam;
  for (const T bad : {std::numeric_limits<T>::infinity(), std::numeric_limits<T>::quiet_NaN()})
    for (const std::size_t place : {0, 2050, 3000}) {
      auto x = values<T>(3001, 5);
      x[place] = bad;
      EXPECT_FALSE(std::isfinite(sum_of_squares(x.data(), 3001))) << place;
    }
}

// 1e30 squared exceeds a float's range.
TEST(SumOfSquares, DoesNotOverflowWhereFloatsWould) {
  const std::vector<float> x(4096, 1e30f);
  EXPECT_NEAR(std::sqrt(sum_of_squares(x.data(), 4096)) / (64 * double{1e30f}), 1, 1e-15);
}

}  // namespace
}  // namespace lockstep::optim
