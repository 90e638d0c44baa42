// Rounding to 16 bits: to the nearest, and at random with the float as the expected value.
#include <lockstep/optim/kernels/low_precision.h>

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/philox.h>

namespace lockstep::optim {
namespace {

template <typename T>
class Narrowed : public ::testing::Test {};
using NarrowTypes = ::testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(Narrowed, NarrowTypes);

template <typename T>
std::vector<float> narrowed_at_random(const std::vector<float>& values, const RandomBits& random) {
  std::vector<T> narrow_values(values.size());
  narrow(values.data(), static_cast<std::int64_t>(values.size()), narrow_values.data(), random);
  std::vector<float> back(values.size());
  widen(narrow_values.data(), static_cast<std::int64_t>(values.size()), back.data());
  return back;
}

template <typename T>
std::vector<float> to_nearest(const std::vector<float>& values) {
  std::vector<T> narrow_values(values.size());
  narrow(values.data(), static_cast<std::int64_t>(values.size()), narrow_values.data());
  std::vector<float> back(values.size());
  widen(narrow_values.data(), static_cast<std::int64_t>(values.size()), back.data());
  return back;
}

// Of both types, normal and small; float16's last bit of 3e-6 is 2^-24.
const std::vector<float> kValues = {1.0009765f, -1.7f, 0.1f,    -3.0e-6f, 123.456f,
                                    -1.0e-3f,   7.77f, 2.5e-5f, 1023.7f};

TYPED_TEST(Narrowed, IsOneOfTwoNeighboursAndTheValueOnAverage) {
  constexpr std::int64_t kDrawn = 40'000;
  for (const float value : kValues) {
    const std::vector<float> got = narrowed_at_random<TypeParam>(std::vector<float>(kDrawn, value),
                                                                 {.key = 7, .step = 3, .first = 5});
    float low = std::numeric_limits<float>::max(), high = -low;
    double sum = 0;
    for (const float one : got) {
      low = std::min(low, one);
      high = std::max(high, one);
      sum += one;
    }
    ASSERT_LT(low, high) << value;
    EXPECT_TRUE(low <= value && value <= high) << value;
    for (const float one : got) ASSERT_TRUE(one == low || one == high) << value;
    // Neighbours: the nearest is one of them, and no number of 16 bits lies between.
    EXPECT_EQ(to_nearest<TypeParam>({low + (high - low) / 4}).front(), low);
    EXPECT_EQ(to_nearest<TypeParam>({low + (high - low) / 4 * 3}).front(), high);
    // Five standard deviations of the mean.
    EXPECT_NEAR(sum / kDrawn, value, 5 * (high - low) / 2 / std::sqrt(kDrawn)) << value;
  }
}

TYPED_TEST(Narrowed, StaysWhereNothingHasToBeRounded) {
  const float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value :
       {0.0f, -0.0f, 1.0f, -0.5f, 0x1p-14f, 0x1p-20f, 1.5f, kInfinity, -kInfinity})
    for (const float one :
         narrowed_at_random<TypeParam>(std::vector<float>(100, value), {.key = 1})) {
      EXPECT_EQ(one, value);
      EXPECT_EQ(std::signbit(one), std::signbit(value));
    }
  for (const float one : narrowed_at_random<TypeParam>(
           std::vector<float>(100, std::numeric_limits<float>::quiet_NaN()), {.key = 1}))
    EXPECT_TRUE(std::isnan(one));
}

TYPED_TEST(Narrowed, HasTheSameBitsWhereverATensorIsCut) {
  std::vector<float> values;
  for (std::uint64_t i = 0; i < 1000; ++i)
    values.push_back(Philox::uniform(Philox::words(9, i)[0]) - 0.5f);
  const std::vector<float> whole = narrowed_at_random<TypeParam>(values, {.key = 4, .step = 11});
  for (const std::size_t cut : {1u, 7u, 8u, 129u, 500u, 999u}) {
    std::vector<float> parts = narrowed_at_random<TypeParam>(
        {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(cut)},
        {.key = 4, .step = 11});
    for (const float one : narrowed_at_random<TypeParam>(
             {values.begin() + static_cast<std::ptrdiff_t>(cut), values.end()},
             {.key = 4, .step = 11, .first = static_cast<std::int64_t>(cut)}))
      parts.push_back(one);
    EXPECT_EQ(parts, whole) << cut;
  }
  EXPECT_NE(narrowed_at_random<TypeParam>(values, {.key = 4, .step = 12}), whole);
  EXPECT_NE(narrowed_at_random<TypeParam>(values, {.key = 5, .step = 11}), whole);
}

TEST(NarrowedAtRandom, TakesSixteenBitsOfACallOfPhiloxForEachElement) {
  // A bfloat16 goes up where the 16 bits that it loses and the random ones make 2^16.
  const float value = 1.0f + 0x1p-8f;  // half of its last bit
  const RandomBits random{.key = 0x123456789abcdefull, .step = 77, .first = 1003};
  const std::vector<float> got =
      narrowed_at_random<BFloat16>(std::vector<float>(50, value), random);
  for (std::uint64_t i = 0; i < got.size(); ++i) {
    const std::uint64_t element = 1003 + i;
    const std::uint32_t word = Philox::words(random.key, element / 8, 77)[element % 8 / 2];
    const std::uint32_t bits = element % 2 == 0 ? word & 0xffff : word >> 16;
    EXPECT_EQ(got[i], bits >= 0x8000 ? 1.0f + 0x1p-7f : 1.0f) << i;
  }
}

}  // namespace
}  // namespace lockstep::optim
