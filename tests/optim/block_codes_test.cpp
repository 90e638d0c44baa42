// Codes of 8 bits: the map's values, the nearest of them, and that what was decoded comes back.
#include <lockstep/optim/kernels/block_codes.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include <lockstep/base/philox.h>

namespace lockstep::optim {
namespace {

constexpr CodeMap kBoth[] = {CodeMap::with_sign, CodeMap::without_sign};

// Numbers of many magnitudes, from 0 on for a map without a sign.
std::vector<float> numbers_for(CodeMap map, std::int64_t count, std::uint64_t key) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto words = Philox::words(key, static_cast<std::uint64_t>(i));
    const float magnitude = std::pow(10.0f, -9 * Philox::uniform(words[0]));
    const bool is_negative = map == CodeMap::with_sign && Philox::uniform(words[1]) < 0.5f;
    values.push_back(is_negative ? -magnitude : magnitude);
  }
  return values;
}

TEST(BlockCodes, ValuesAreThoseOfTheDynamicMap) {
  for (const CodeMap map : kBoth) {
    const auto& values = values_of(map);
    EXPECT_EQ(std::set<float>(values.begin(), values.end()).size(), 256u);
    EXPECT_EQ(values[code_of_zero(map)], 0);
    EXPECT_EQ(values.back(), 1);
    EXPECT_TRUE(std::is_sorted(values.begin(), values.end()));
  }
  const auto& with_sign = values_of(CodeMap::with_sign);
  EXPECT_EQ(code_of_zero(CodeMap::with_sign), 127);
  EXPECT_FLOAT_EQ(with_sign[0], -0.99296875f);
  EXPECT_FLOAT_EQ(with_sign[254], 0.99296875f);
  EXPECT_FLOAT_EQ(with_sign[128], 0.55e-6f);
  const auto& without_sign = values_of(CodeMap::without_sign);
  EXPECT_FLOAT_EQ(without_sign[1], 0.325e-6f);
  EXPECT_FLOAT_EQ(without_sign[254], 0.996484375f);
}

TEST(BlockCodes, AreTheNearest) {
  for (const CodeMap map : kBoth) {
    std::vector<float> values = numbers_for(map, 20'000, 3);
    // Around each middle, too.
    const auto& all = values_of(map);
    for (std::size_t i = 0; i + 1 < 256; ++i) {
      const float middle = (all[i] + all[i + 1]) / 2;
      values.insert(values.end(), {std::nextafter(middle, -1.0f), std::nextafter(middle, 1.0f)});
    }
    std::vector<std::uint8_t> codes(values.size());
    encode(map, values.data(), std::ssize(values), 1, codes.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto off = [&](float value) { return std::abs(double{value} - values[i]); };
      double least = std::numeric_limits<double>::infinity();
      for (const float value : all) least = std::min(least, off(value));
      ASSERT_NEAR(off(all[codes[i]]), least, 1e-7 * std::abs(values[i])) << values[i];
    }
  }
}

TEST(BlockCodes, TheScaleIsTheLargestWithItsSign) {
  for (const std::int64_t count : {1, 5, 16, 17, 256}) {
    std::vector<float> values = numbers_for(CodeMap::with_sign, count, 5);
    values.back() = -3;
    EXPECT_EQ(scale_of(values.data(), count), -3);
    if (count > 1) values.front() = 3;
    EXPECT_EQ(scale_of(values.data(), count), count > 1 ? 3 : -3);
  }
  EXPECT_EQ(scale_of(nullptr, 0), 0);
  EXPECT_EQ(larger_scale(-2, 2), 2);
  EXPECT_EQ(larger_scale(2, -2), 2);
  EXPECT_EQ(larger_scale(0, -1), -1);
}

// Also where the largest is negative, for which the map alone has no code.
TEST(BlockCodes, WhatWasDecodedComesBack) {
  for (const CodeMap map : kBoth)
    for (int block = 0; block < 200; ++block) {
      const float unit = std::pow(10.0f, static_cast<float>(block % 40 - 34));
      std::vector<float> values = numbers_for(map, kCodeBlock, 100 + block);
      for (float& value : values) value *= unit;
      std::vector<std::uint8_t> codes(kCodeBlock), again(kCodeBlock);
      const float scale =
          encode(map, values.data(), kCodeBlock, scale_of(values.data(), kCodeBlock), codes.data());
      std::vector<float> decoded(kCodeBlock);
      decode(map, codes.data(), kCodeBlock, scale, decoded.data());
      if (scale != 0) {
        EXPECT_EQ(scale, scale_of(values.data(), kCodeBlock));
      }
      const float scale_again = encode(map, decoded.data(), kCodeBlock,
                                       scale_of(decoded.data(), kCodeBlock), again.data());
      EXPECT_EQ(scale_again, scale) << unit;
      EXPECT_EQ(again, codes) << unit;
    }
}

TEST(BlockCodes, NextToNothingIsZeros) {
  const std::vector<float> values = {1e-31f, -2e-31f};
  std::vector<std::uint8_t> codes(2);
  EXPECT_EQ(encode(CodeMap::with_sign, values.data(), 2, -2e-31f, codes.data()), 0);
  std::vector<float> decoded = {1, 1};
  decode(CodeMap::with_sign, codes.data(), 2, 0, decoded.data());
  EXPECT_EQ(decoded, std::vector<float>(2));
}

}  // namespace
}  // namespace lockstep::optim
