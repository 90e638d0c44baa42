#include <lockstep/base/float16.h>

#include <cmath>

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Float16, RoundsToNearestEvenBothWays) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(half);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(to_float16(wide))));
      continue;
    }
    EXPECT_EQ(to_float16(wide).bits, half.bits) << bits;
    // A number halfway to the next one is rounded to the even one.
    if ((bits & 0x7fff) < 0x7bff) {
      const float next = to_float(Float16{static_cast<std::uint16_t>(bits + 1)});
      const float middle = (wide + next) / 2;
      EXPECT_EQ(to_float16(middle).bits, (bits & 1) != 0 ? bits + 1 : bits) << bits;
    }
  }
  EXPECT_EQ(to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(to_bfloat16(1.00390625f).bits, 0x3f80);  // halfway, to even
  EXPECT_EQ(to_bfloat16(1.01171875f).bits, 0x3f82);
}

}  // namespace
}  // namespace lockstep
