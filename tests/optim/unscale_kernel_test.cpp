// The loop by itself, compared with a division of each element, with inf and nan in every place.
#include <lockstep/optim/kernels/gradients.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/float16.h>
#include <lockstep/base/philox.h>

namespace lockstep::optim {
namespace {

template <typename T>
struct Type;

template <>
struct Type<float> {
  using Scale = float;
  static float from(double value) { return static_cast<float>(value); }
  static auto bits(float value) { return std::bit_cast<std::uint32_t>(value); }
  static float divided(float value, float scale) { return value / scale; }
  static constexpr double kLargest = std::numeric_limits<float>::max();
};
template <>
struct Type<double> {
  using Scale = double;
  static double from(double value) { return value; }
  static auto bits(double value) { return std::bit_cast<std::uint64_t>(value); }
  static double divided(double value, double scale) { return value / scale; }
  static constexpr double kLargest = std::numeric_limits<double>::max();
};
template <>
struct Type<Float16> {
  using Scale = float;
  static Float16 from(double value) { return to_float16(static_cast<float>(value)); }
  static auto bits(Float16 value) { return value.bits; }
  static Float16 divided(Float16 value, float scale) { return to_float16(to_float(value) / scale); }
  static constexpr double kLargest = 65504;
};
template <>
struct Type<BFloat16> {
  using Scale = float;
  static BFloat16 from(double value) { return to_bfloat16(static_cast<float>(value)); }
  static auto bits(BFloat16 value) { return value.bits; }
  static BFloat16 divided(BFloat16 value, float scale) {
    return to_bfloat16(to_float(value) / scale);
  }
  static constexpr double kLargest = 0x1.fep127;
};

template <typename T>
std::vector<T> wide_values(std::int64_t count, std::uint64_t key) {
  std::vector<T> result;
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(count); ++i)
    result.push_back(Type<T>::from(1000.0 * Philox::uniform(Philox::words(key, i)[0]) - 500));
  return result;
}

template <typename T>
class Unscale : public ::testing::Test {};
using UnscaledTypes = ::testing::Types<float, double, Float16, BFloat16>;
TYPED_TEST_SUITE(Unscale, UnscaledTypes);

TYPED_TEST(Unscale, DividesEachElement) {
  using T = TypeParam;
  using Scale = typename Type<T>::Scale;
  for (const Scale scale : {Scale(65536), Scale(1), Scale(3), Scale(0.5), Scale(0x1p100)})
    for (const std::int64_t count : {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 1003}) {
      const std::vector<T> before = wide_values<T>(count, 1);
      std::vector<T> after = before;
      EXPECT_FALSE(unscale(after.data(), count, scale));
      for (std::size_t i = 0; i < before.size(); ++i)
        ASSERT_EQ(Type<T>::bits(after[i]), Type<T>::bits(Type<T>::divided(before[i], scale)))
            << i << " of " << count;
    }
}

TYPED_TEST(Unscale, FindsWhatIsNotFiniteInEveryPlace) {
  using T = TypeParam;
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad : {infinity, -infinity, std::nan("")})
    for (std::int64_t count = 1; count <= 70; ++count)
      for (std::int64_t place = 0; place < count; ++place) {
        std::vector<T> gradient = wide_values<T>(count, 2);
        gradient[static_cast<std::size_t>(place)] = Type<T>::from(bad);
        ASSERT_TRUE(unscale(gradient.data(), count, 1024)) << place << " of " << count;
      }
}

TYPED_TEST(Unscale, TheLargestNumberIsFiniteUnlessTheDivisionMakesItInfinite) {
  using T = TypeParam;
  std::vector<T> gradient(37, Type<T>::from(Type<T>::kLargest));
  EXPECT_FALSE(unscale(gradient.data(), 37, 1));
  EXPECT_FALSE(unscale(gradient.data(), 37, 2));
  EXPECT_FALSE(unscale(gradient.data(), 37, 0.5f));
  EXPECT_TRUE(unscale(gradient.data(), 37, 0.5f));
}

TYPED_TEST(Unscale, LeavesWhatIsBesideItAlone) {
  using T = TypeParam;
  const std::vector<T> before = wide_values<T>(40, 3);
  std::vector<T> after = before;
  after[0] = Type<T>::from(std::nan(""));
  after[38] = Type<T>::from(std::nan(""));
  EXPECT_FALSE(unscale(after.data() + 1, 37, 2));
  EXPECT_EQ(Type<T>::bits(after[39]), Type<T>::bits(before[39]));
}

}  // namespace
}  // namespace lockstep::optim
