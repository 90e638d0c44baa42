// exp and the normal distribution's tail in float32, without a branch or a call, so that loops
// around them become vector code on every CPU. Every instruction set gives the same bits.
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
  // ln 2 is split into two parts; the first has few enough bits for n·part to be exact.
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 0.00138144620f;
  p = p * r + 0.00836878088f;
  p = p * r + 0.0416683943f;
  p = p * r + 0.166665201f;
  p = p * r + 0.499999934f;
  p = (p * r) * r + r + 1.0f;
  // 2^n is made from the bits of its exponent and multiplied: adding to the bits of p would turn
  // some NaNs into numbers.
  const auto exponent = (std::bit_cast<std::uint32_t>(shifted) << 23) + (127u << 23);
  return p * std::bit_cast<float>(exponent);
}

// e^x for any x; 0 and infinity beyond the range of bounded_exp.
inline float vector_exp(float x) {
  const float result = x > 88.0f ? std::numeric_limits<float>::infinity() : bounded_exp(x);
  return x < -87.0f ? 0.0f : result;
}

// P(X > a) of the standard normal distribution for a >= 0, given e^(-a²/2). It is that factor times
// a polynomial of 1 / (1 + 0.35·a), which was fitted up to a = 15 and is within 3.2e-8 of the true
// value there.
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
