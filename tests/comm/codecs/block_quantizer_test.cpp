#include <lockstep/comm/codecs/block_quantizer.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/philox.h>

#include "../../base/errors.h"
#include "plain_codec.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16};
constexpr QuantizedType kTypes[] = {QuantizedType::int8, QuantizedType::int4};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kSmallestScale = std::numeric_limits<float>::min();

// Lengths that leave every remainder after vectors, bytes and blocks.
std::vector<std::size_t> odd_counts() {
  std::vector<std::size_t> counts = {255, 256, 257, 511, 512, 513, 1003, 4099};
  for (std::size_t count = 0; count <= 70; ++count) counts.push_back(count);
  return counts;
}

// Numbers of both signs and very different sizes.
std::vector<float> numbers(std::size_t count, std::uint64_t key) {
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) {
    const auto words = Philox::words(key, i);
    values.push_back((2 * Philox::uniform(words[0]) - 1) *
                     std::exp2(8 * Philox::uniform(words[1]) - 6));
  }
  return values;
}

// The values after rounding to the type.
std::vector<float> rounded(DType dtype, const std::vector<float>& values) {
  const Bytes bytes = to_bytes(dtype, values);
  std::vector<float> result;
  for (std::size_t i = 0; i < values.size(); ++i) result.push_back(value_at(dtype, bytes, i));
  return result;
}

Bytes encode(const BlockFormat& format, DType dtype, const std::vector<float>& values) {
  const std::size_t size = encoded_bytes(values.size(), format);
  Bytes message(size + 8, std::byte{0xa5});  // must be written completely, and nothing after it
  encode_blocks(format, dtype, to_bytes(dtype, values).data(), values.size(), message.data());
  EXPECT_TRUE(std::all_of(message.begin() + static_cast<std::ptrdiff_t>(size), message.end(),
                          [](std::byte byte) { return byte == std::byte{0xa5}; }));
  message.resize(size);
  return message;
}

Bytes decode_bytes(const BlockFormat& format, DType dtype, const Bytes& message,
                   std::size_t count) {
  Bytes values(count * size_of(dtype) + 8, std::byte{0xa5});
  decode_blocks(format, dtype, message.data(), count, values.data());
  EXPECT_TRUE(std::all_of(values.end() - 8, values.end(),
                          [](std::byte byte) { return byte == std::byte{0xa5}; }));
  values.resize(count * size_of(dtype));
  return values;
}

std::vector<float> decode(const BlockFormat& format, const Bytes& message, std::size_t count) {
  const Bytes bytes = decode_bytes(format, DType::float32, message, count);
  std::vector<float> values;
  for (std::size_t i = 0; i < count; ++i) values.push_back(value_at(DType::float32, bytes, i));
  return values;
}

std::vector<float> there_and_back(const BlockFormat& format, const std::vector<float>& values) {
  return decode(format, encode(format, DType::float32, values), values.size());
}

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

// Runs a check for each format and element type that matters.
template <typename Check>
void for_formats(Check check) {
  for (const QuantizedType type : kTypes)
    for (const std::size_t block : {2, 6, 32, 256}) check(BlockFormat{type, block});
}

TEST(BlockFormat, SizesAreAFunctionOfTheCount) {
  const BlockFormat int8{};
  EXPECT_EQ(int8.block, 256u);
  EXPECT_EQ(encoded_bytes(0, int8), 0u);
  EXPECT_EQ(encoded_bytes(1, int8), 4u + 4u);
  EXPECT_EQ(encoded_bytes(4, int8), 4u + 4u);
  EXPECT_EQ(encoded_bytes(5, int8), 8u + 4u);
  EXPECT_EQ(encoded_bytes(256, int8), 256u + 4u);
  EXPECT_EQ(encoded_bytes(257, int8), 260u + 8u);
  const BlockFormat int4{QuantizedType::int4, 256};
  EXPECT_EQ(encoded_bytes(0, int4), 0u);
  EXPECT_EQ(encoded_bytes(1, int4), 4u + 4u);
  EXPECT_EQ(encoded_bytes(8, int4), 4u + 4u);
  EXPECT_EQ(encoded_bytes(9, int4), 8u + 4u);
  EXPECT_EQ(encoded_bytes(512, int4), 256u + 8u);
  EXPECT_EQ(encoded_bytes(513, int4), 260u + 12u);
  EXPECT_EQ(scales_offset(513, int4), 260u);
  EXPECT_EQ(num_blocks(513, int4), 3u);
  // int8 takes a quarter of float32, int4 an eighth, and both add the scales.
  EXPECT_EQ(encoded_bytes(std::size_t{1} << 30, int8), (std::size_t{1} << 30) * 65 / 64);
  EXPECT_EQ(encoded_bytes(std::size_t{1} << 30, int4), (std::size_t{1} << 29) * 33 / 32);
}

TEST(BlockQuantizer, Int8Message) {
  // 254 = 127 · 2, so that the scale is 2; then 1 = 127 / 127.
  const Bytes message = encode({QuantizedType::int8, 4}, DType::float32, {254, -254, 7, -6, -127});
  EXPECT_EQ(message, bytes({127, -127, 4, -3, -127, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0x80, 0x3f}));
}

TEST(BlockQuantizer, Int4Message) {
  const Bytes message = encode({QuantizedType::int4, 4}, DType::float32, {7, -7, 1, -1, 14});
  EXPECT_EQ(message, bytes({0x97, 0xf1, 0x07, 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0x40}));
}

TEST(BlockQuantizer, HalfwayGoesToTheEvenOne) {
  const std::vector<float> values = {127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5};
  EXPECT_EQ(there_and_back({QuantizedType::int8, 8}, values),
            (std::vector<float>{127, 0, 2, 2, 0, -2, -2, 126}));
  const std::vector<float> fewer = {7, 0.5, 1.5, 2.5, -0.5, -1.5, 6.5, -6.5};
  EXPECT_EQ(there_and_back({QuantizedType::int4, 8}, fewer),
            (std::vector<float>{7, 0, 2, 2, 0, -2, 6, -6}));
}

TEST(BlockQuantizer, HasTheBitsOfThePlainLoop) {
  for_formats([](const BlockFormat& format) {
    for (const DType dtype : kDTypes)
      for (const std::size_t count : odd_counts()) {
        const std::vector<float> values = rounded(dtype, numbers(count, count + 1));
        const Bytes message = encode(format, dtype, values);
        ASSERT_EQ(message, plain_encode(format, values)) << name(dtype) << " " << count;
        ASSERT_EQ(decode_bytes(format, dtype, message, count),
                  to_bytes(dtype, plain_decode(format, message, count)))
            << name(dtype) << " " << count;
      }
  });
}

// Messages of `count` numbers, one after the other with a few bytes between them.
struct Row {
  Row(const BlockFormat& format, std::size_t number, std::size_t count)
      : stride(encoded_bytes(count, format) + 12), bytes(number * stride) {
    for (std::size_t k = 0; k < number; ++k) {
      const Bytes message = encode(format, DType::float32, numbers(count, k + 1));
      std::copy(message.begin(), message.end(),
                bytes.begin() + static_cast<std::ptrdiff_t>(k * stride));
      decoded.push_back(plain_decode(format, message, count));
    }
  }
  Messages messages() const { return {bytes.data(), decoded.size(), stride}; }

  std::size_t stride;
  Bytes bytes;
  std::vector<std::vector<float>> decoded;
};

// Computes the canonical order by itself: split at the largest power of two below the count.
float tree_sum(const std::vector<std::vector<float>>& terms, std::size_t first, std::size_t count,
               std::size_t i) {
  if (count == 1) return terms[first][i];
  std::size_t left = 1;
  while (left * 2 < count) left *= 2;
  return tree_sum(terms, first, left, i) + tree_sum(terms, first + left, count - left, i);
}

TEST(BlockQuantizer, AddsInTheCanonicalOrder) {
  for (const BlockFormat& format :
       {BlockFormat{QuantizedType::int8, 256}, BlockFormat{QuantizedType::int4, 256},
        BlockFormat{QuantizedType::int8, 6}, BlockFormat{QuantizedType::int4, 1000}})
    for (const std::size_t count : {0, 1, 7, 255, 256, 257, 1003})
      for (std::size_t number = 1; number <= 17; ++number) {
        const Row row(format, number, count);
        for (const float divisor : {1.0f, 3.0f})
          for (const DType dtype : kDTypes) {
            std::vector<float> expected(count);
            for (std::size_t i = 0; i < count; ++i)
              expected[i] = tree_sum(row.decoded, 0, number, i) / divisor;
            Bytes values(count * size_of(dtype) + 8, std::byte{0xa5});
            decode_sum(format, dtype, row.messages(), count, divisor, values.data());
            EXPECT_TRUE(std::all_of(values.end() - 8, values.end(),
                                    [](std::byte byte) { return byte == std::byte{0xa5}; }));
            values.resize(count * size_of(dtype));
            ASSERT_EQ(values, to_bytes(dtype, expected))
                << number << " messages of " << count << " to " << name(dtype);
          }
      }
}

TEST(BlockQuantizer, IsWithinHalfAScale) {
  for_formats([](const BlockFormat& format) {
    for (const DType dtype : kDTypes) {
      const std::vector<float> values = rounded(dtype, numbers(5003, 3));
      const Bytes message = encode(format, dtype, values);
      const std::vector<float> back = decode(format, message, values.size());
      for (std::size_t i = 0; i < values.size(); ++i) {
        const double scale = scale_of(format, message, values.size(), i);
        // Besides half a scale, allows for the roundings of floats of up to 127 scales.
        ASSERT_LE(std::abs(double{values[i]} - double{back[i]}), scale * (0.5 + 127 * 0x1p-22));
      }
    }
  });
}

TEST(BlockQuantizer, TheLargestComesBack) {
  for (const QuantizedType type : kTypes)
    for (const DType dtype : kDTypes) {
      const BlockFormat format{type, 16};
      for (std::uint64_t key = 0; key < 300; ++key) {
        std::vector<float> values = rounded(dtype, numbers(16, key));
        const auto largest = std::max_element(values.begin(), values.end(), [](float a, float b) {
          return std::abs(a) < std::abs(b);
        });
        const auto place = static_cast<std::size_t>(largest - values.begin());
        const Bytes message = encode(format, dtype, values);
        const float back = value_at(dtype, decode_bytes(format, dtype, message, 16), place);
        if (dtype == DType::float32)
          EXPECT_LE(std::abs(back - *largest),
                    std::nextafter(std::abs(*largest), kInfinity) - std::abs(*largest));
        else
          EXPECT_EQ(back, *largest);
      }
    }
}

TEST(BlockQuantizer, EncodingAgainGivesTheSameMessage) {
  for_formats([](const BlockFormat& format) {
    for (std::uint64_t key = 0; key < 40; ++key) {
      std::vector<float> values = numbers(1003, key);
      if (key % 4 == 1) values[500] = kNaN;
      if (key % 4 == 2)
        for (float& value : values) value *= 0x1p-126f;  // around the smallest scale
      if (key % 4 == 3)
        for (float& value : values) value *= 0x1p125f;
      const Bytes message = encode(format, DType::float32, values);
      EXPECT_EQ(encode(format, DType::float32, decode(format, message, values.size())), message);
    }
  });
}

TEST(BlockQuantizer, WhatIsNotFiniteSpoilsItsBlockAndNoOther) {
  for (const QuantizedType type : kTypes)
    for (const DType dtype : kDTypes)
      for (const float bad : {kInfinity, -kInfinity, kNaN, -kNaN})
        for (std::size_t place = 0; place < 71; ++place) {
          const BlockFormat format{type, 32};
          std::vector<float> values = rounded(dtype, numbers(71, 4));
          const std::vector<float> without = decode(format, encode(format, dtype, values), 71);
          values[place] = bad;
          const Bytes message = encode(format, dtype, values);
          const std::vector<float> back = decode(format, message, 71);
          const Bytes narrow = decode_bytes(format, dtype, message, 71);
          std::vector<float> sums(71);
          Bytes both = encode(format, dtype, std::vector<float>(71, 1));
          both.insert(both.end(), message.begin(), message.end());
          decode_sum(format, DType::float32, {both.data(), 2, message.size()}, 71, 1,
                     reinterpret_cast<std::byte*>(sums.data()));
          for (std::size_t i = 0; i < 71; ++i) {
            const bool spoilt = i / 32 == place / 32;
            ASSERT_EQ(std::isnan(back[i]), spoilt) << i << " " << place;
            ASSERT_EQ(std::isnan(value_at(dtype, narrow, i)), spoilt);
            ASSERT_EQ(std::isnan(sums[i]), spoilt);
            ASSERT_TRUE(spoilt || back[i] == without[i]);
          }
        }
}

TEST(BlockQuantizer, ZerosAreZeros) {
  for_formats([](const BlockFormat& format) {
    const std::vector<float> values = {0.0f, -0.0f, 0.0f, -0.0f, -0.0f};
    for (const DType dtype : kDTypes) {
      const Bytes message = encode(format, dtype, values);
      EXPECT_EQ(scale_of(format, message, 5, 0), kSmallestScale);
      for (const float value : decode(format, message, 5)) {
        EXPECT_EQ(value, 0);
        EXPECT_FALSE(std::signbit(value));
      }
    }
  });
}

TEST(BlockQuantizer, SubnormalsCostNoMoreThanTheSmallestScale) {
  for_formats([](const BlockFormat& format) {
    std::vector<float> values;
    for (int i = 0; i < 400; ++i)
      values.push_back(static_cast<float>(i - 200) * std::numeric_limits<float>::denorm_min() *
                       static_cast<float>(1 + i * 397));
    values[7] = 3 * kSmallestScale;
    const std::vector<float> back = there_and_back(format, values);
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_LE(std::abs(values[i] - back[i]), kSmallestScale / 2) << i;
  });
  // float16's subnormals are normal as floats: nothing is lost there.
  const float smallest = 0x1p-24f;
  const std::vector<float> halves = {127 * smallest, smallest, -3 * smallest, 0};
  EXPECT_EQ(decode({}, encode({}, DType::float16, halves), 4), halves);
}

TEST(BlockQuantizer, TheLargestFloatsStayFinite) {
  const float most = std::numeric_limits<float>::max();
  for_formats([&](const BlockFormat& format) {
    for (float value = most; value > most * 0.999f; value = std::nextafter(value * 0.9999f, 0.0f)) {
      const std::vector<float> back = there_and_back(format, {value, -value, 1});
      EXPECT_TRUE(std::isfinite(back[0]));
      EXPECT_NEAR(back[0] / value, 1, 1e-6);
      EXPECT_EQ(back[1], -back[0]);
      const Bytes message = encode(format, DType::float32, back);
      EXPECT_EQ(encode(format, DType::float32, decode(format, message, 3)), message);
    }
  });
}

TEST(BlockQuantizer, MessagesNeedNoAlignment) {
  for_formats([](const BlockFormat& format) {
    const std::vector<float> values = numbers(777, 5);
    const Bytes values_bytes = to_bytes(DType::float32, values);
    const Bytes expected = encode(format, DType::float32, values);
    Bytes shifted(expected.size() + 1);
    encode_blocks(format, DType::float32, values_bytes.data(), values.size(), shifted.data() + 1);
    EXPECT_TRUE(std::equal(expected.begin(), expected.end(), shifted.begin() + 1));
    std::vector<float> back(values.size());
    decode_blocks(format, DType::float32, shifted.data() + 1, values.size(),
                  reinterpret_cast<std::byte*>(back.data()));
    EXPECT_EQ(back, plain_decode(format, expected, values.size()));
  });
}

TEST(BlockQuantizer, Refusals) {
  std::byte memory[16] = {};
  for (const std::size_t block : {0, 1, 255})
    EXPECT_THAT(usage_error([&] {
                  encode_blocks({QuantizedType::int4, block}, DType::float32, memory, 1, memory);
                }),
                HasSubstr("blocks of " + std::to_string(block)));
  EXPECT_THAT(usage_error([&] { encode_blocks({}, DType::float64, memory, 1, memory + 8); }),
              HasSubstr("float64"));
  EXPECT_THAT(usage_error([&] { decode_blocks({}, DType::int32, memory, 1, memory + 8); }),
              HasSubstr("int32"));
}

}  // namespace
}  // namespace lockstep::comm::testing
