// exp and the normal distribution's tail in float32, without a branch or a call, so that a loop
// around them becomes vector code on every CPU. Bits are the same in every instruction set.
#pragma once

#include <bit>
#include <cstdint>

namespace lockstep::nn::internal {

// Relative error below 1.2e-7 where the result is a normal number, and the right limits: 0, inf,
// NaN.
inline float vector_exp(float x) {
  // Beyond these the result is 0 or infinite anyway. Written so that NaN passes.
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
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
  // 2^n in two factors: one alone does not reach denormal numbers, nor infinity.
  const std::int32_t whole = std::bit_cast<std::int32_t>(shifted) - 0x4B400000;
  const std::int32_t half = whole >> 1;
  const float first = std::bit_cast<float>((half + 127) << 23);
  const float second = std::bit_cast<float>((whole - half + 127) << 23);
  return p * first * second;
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
