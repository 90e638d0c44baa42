// exp and the normal distribution's tail in float32, without a branch or a call, so that a loop
// around them becomes vector code on every CPU. Bits are the same in every instruction set.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace lockstep::nn::internal {

// e^x for x from -87 to 88, and for NaN; the relative error is below 1.2e-7.
inline float bounded_exp(float x) {
  // x = n·ln 2 + r, |r| <= ln(2)/2: adding 1.5·2^23 rounds to a whole number, in the low bits.
  const float shifted = x * 1.44269504f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  // ln 2 in two parts, the first with few enough bits for n·part to be exact.
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 0.00138144620f;
  p = p * r + 0.00836878088f;
  p = p * r + 0.0416683943f;
  p = p * r + 0.166665201f;
  p = p * r + 0.499999934f;
  p = (p * r) * r + r + 1.0f;
  // 2^n, made of its exponent's bits. A product, as sums of bits would make numbers of some NaNs.
  const auto exponent = (std::bit_cast<std::uint32_t>(shifted) << 23) + (127u << 23);
  return p * std::bit_cast<float>(exponent);
}

// e^x for any x, 0 and infinity where bounded_exp ends.
inline float vector_exp(float x) {
  const float result = x > 88.0f ? std::numeric_limits<float>::infinity() : bounded_exp(x);
  return x < -87.0f ? 0.0f : result;
}

// P(X > a) of the standard normal distribution for a >= 0, given e^(-a²/2): that times a function
// of a which is a polynomial of 1 / (1 + 0.35·a) to within 3.2e-8 of its value, fitted up to a
// = 15.
inline float normal_tail(float a, float exp_half_square) {
  const float t = 1.0f / (1.0f + 0.35f * a);
  float p = -0.0291641122f;
  p = p * t + 0.144061689f;
  p = p * t + -0.255903645f;
  p = p * t + 0.159394879f;
  p = p * t + -0.0232651360f;
  p = p * t + 0.105575326f;
  p = p * t + 0.119815373f;
  p = p * t + 0.139864352f;
  p = p * t + 0.139621258f;
  return exp_half_square * (p * t);
}

}  // namespace lockstep::nn::internal
