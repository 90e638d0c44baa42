#include <lockstep/optim/kernels/block_codes.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

constexpr float kLeastScale = 0x1p-100f;
constexpr int kDecades = 7;  // of values below the scale

struct Codes {
  std::array<float, 256> values;
  // Between a value and the next; a number above it is nearer to the next.
  std::array<float, 256> middles;
  // By the upper 16 bits of a float: the code of the lowest number that begins with them. There is
  // at most one middle among those numbers.
  std::array<std::uint8_t, 65536> of_lowest;
  std::uint8_t zero;
};

// A decade is cut into equal parts, the next one into twice as many; values are their middles.
std::array<float, 256> make_values(CodeMap map) {
  std::vector<float> values = {0, 1};
  for (int decade = 0; decade < kDecades; ++decade) {
    const int parts = (map == CodeMap::with_sign ? 1 : 2) << decade;
    for (int part = 0; part < parts; ++part) {
      const double value =
          std::pow(10.0, decade - (kDecades - 1)) * (0.1 + 0.9 * (part + 0.5) / parts);
      values.push_back(static_cast<float>(value));
      if (map == CodeMap::with_sign) values.push_back(static_cast<float>(-value));
    }
  }
  std::ranges::sort(values);
  std::array<float, 256> all;
  std::ranges::copy(values, all.begin());
  return all;
}

Codes make_codes(CodeMap map) {
  Codes codes{.values = make_values(map)};
  for (std::size_t i = 0; i + 1 < 256; ++i)
    codes.middles[i] = (codes.values[i] + codes.values[i + 1]) / 2;
  codes.middles[255] = std::numeric_limits<float>::infinity();
  for (std::uint32_t upper = 0; upper < 65536; ++upper) {
    const bool is_negative = upper >= 32768;
    const float lowest = std::bit_cast<float>(upper << 16 | (is_negative ? 0xffffU : 0U));
    const auto* const above =
        std::partition_point(codes.middles.begin(), codes.middles.begin() + 255,
                             [&](float middle) { return middle < lowest; });
    codes.of_lowest[upper] = static_cast<std::uint8_t>(above - codes.middles.begin());
  }
  codes.zero =
      static_cast<std::uint8_t>(std::ranges::find(codes.values, 0.0f) - codes.values.begin());
  return codes;
}

const Codes& codes_of(CodeMap map) {
  static const Codes with_sign = make_codes(CodeMap::with_sign);
  static const Codes without_sign = make_codes(CodeMap::without_sign);
  return map == CodeMap::with_sign ? with_sign : without_sign;
}

}  // namespace

const std::array<float, 256>& values_of(CodeMap map) { return codes_of(map).values; }

std::uint8_t code_of_zero(CodeMap map) { return codes_of(map).zero; }

float larger_scale(float one, float other) {
  const float a = std::abs(one), b = std::abs(other);
  return b > a || (b == a && other > one) ? other : one;
}

LOCKSTEP_SIMD float scale_of(const float* values, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  float highest[kLanes] = {}, lowest[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane];
      highest[lane] = value > highest[lane] ? value : highest[lane];
      lowest[lane] = value < lowest[lane] ? value : lowest[lane];
    }
  float scale = 0;
  for (; i < count; ++i) scale = larger_scale(scale, values[i]);
  for (std::int64_t lane = 0; lane < kLanes; ++lane)
    scale = larger_scale(larger_scale(scale, highest[lane]), lowest[lane]);
  return scale;
}

float encode(CodeMap map, const float* values, std::int64_t count, float scale,
             std::uint8_t* codes) {
  const Codes& all = codes_of(map);
  if (std::abs(scale) < kLeastScale) {
    std::fill_n(codes, count, all.zero);
    return 0;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = values[i] / scale;
    const std::uint8_t code = all.of_lowest[std::bit_cast<std::uint32_t>(value) >> 16];
    codes[i] = static_cast<std::uint8_t>(code + (value > all.middles[code] ? 1 : 0));
  }
  return scale;
}

void decode(CodeMap map, const std::uint8_t* codes, std::int64_t count, float scale,
            float* values) {
  const std::array<float, 256>& all = codes_of(map).values;
  for (std::int64_t i = 0; i < count; ++i) values[i] = all[codes[i]] * scale;
}

}  // namespace lockstep::optim
