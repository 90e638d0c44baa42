#include <lockstep/optim/kernels/low_precision.h>

#include <algorithm>
#include <array>
#include <bit>

#include <lockstep/base/philox.h>
#include <lockstep/base/simd.h>

namespace lockstep::optim {

namespace {

constexpr std::uint32_t kExponent = 0x7f800000u;

[[gnu::always_inline]] inline void round_to_nearest(float value, BFloat16& to) {
  to = to_bfloat16(value);
}
[[gnu::always_inline]] inline void round_to_nearest(float value, Float16& to) {
  to = to_float16(value);
}

// Random bits are added below the result's last bit: the larger the rest there, the more often they
// carry into it.
[[gnu::always_inline]] inline void round_at_random(float value, std::uint32_t random,
                                                   BFloat16& to) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto rounded = static_cast<std::uint16_t>((bits + random) >> 16);
  to.bits = (bits & kExponent) == kExponent ? to_bfloat16(value).bits : rounded;
}

// As to_float16(), which says what the numbers are: the value in units of the result's last bit,
// and 13 random bits below that.
[[gnu::always_inline]] inline void round_at_random(float value, std::uint32_t random, Float16& to) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t magnitude = std::min(bits & 0x7fffffffu, kExponent - 1);
  const std::uint32_t exponent = std::max(magnitude & kExponent, 113u << 23);
  const float units =
      std::bit_cast<float>(magnitude) / std::bit_cast<float>(exponent - (10u << 23));
  const float below = static_cast<float>(random >> 3) * 0x1p-13f;
  const std::uint32_t rounded = std::min(
      (exponent >> 13) - (113u << 10) + static_cast<std::uint32_t>(units + below), 0x7c00u);
  const auto finite = static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | rounded);
  to.bits = (bits & kExponent) == kExponent ? to_float16(value).bits : finite;
}

template <typename From>
[[gnu::always_inline]] inline void widen_all(const From* __restrict from, std::int64_t count,
                                             float* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <typename To>
[[gnu::always_inline]] inline void narrow_all(const float* __restrict from, std::int64_t count,
                                              To* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) round_to_nearest(from[i], to[i]);
}

// Draws for several elements at once, so that the calls of Philox become vector code.
constexpr std::int64_t kDraws = 16;

template <typename To>
[[gnu::always_inline]] inline void narrow_at_random(const float* __restrict from,
                                                    std::int64_t count, To* __restrict to,
                                                    const RandomBits& random) {
  constexpr std::int64_t kElements = kDraws * kElementsOfADraw;
  std::array<std::uint32_t, kElements> bits;
  const std::int64_t before = random.first % kElementsOfADraw;
  const auto draw = static_cast<std::uint64_t>(random.first / kElementsOfADraw);
  // Elements are counted from the first of their draw.
  for (std::int64_t begin = 0; begin < before + count; begin += kElements) {
    for (std::int64_t i = 0; i < kDraws; ++i) {
      const Philox::Words words = Philox::words(
          random.key, draw + static_cast<std::uint64_t>(begin / kElementsOfADraw + i), random.step);
      for (std::size_t word = 0; word < words.size(); ++word) {
        const auto place = static_cast<std::size_t>(i * kElementsOfADraw) + 2 * word;
        bits[place] = words[word] & 0xffffu;
        bits[place + 1] = words[word] >> 16;
      }
    }
    const std::int64_t end = std::min(begin + kElements, before + count);
    for (std::int64_t i = std::max(begin, before); i < end; ++i)
      round_at_random(from[i - before], bits[static_cast<std::size_t>(i - begin)], to[i - before]);
  }
}

}  // namespace

LOCKSTEP_SIMD void widen(const BFloat16* from, std::int64_t count, float* to) {
  widen_all(from, count, to);
}
LOCKSTEP_SIMD void widen(const Float16* from, std::int64_t count, float* to) {
  widen_all(from, count, to);
}

LOCKSTEP_SIMD void narrow(const float* from, std::int64_t count, BFloat16* to) {
  narrow_all(from, count, to);
}
LOCKSTEP_SIMD void narrow(const float* from, std::int64_t count, Float16* to) {
  narrow_all(from, count, to);
}

LOCKSTEP_SIMD void narrow(const float* from, std::int64_t count, BFloat16* to,
                          const RandomBits& random) {
  narrow_at_random(from, count, to, random);
}
LOCKSTEP_SIMD void narrow(const float* from, std::int64_t count, Float16* to,
                          const RandomBits& random) {
  narrow_at_random(from, count, to, random);
}

LOCKSTEP_SIMD void scale(float* values, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) values[i] *= factor;
}

}  // namespace lockstep::optim
