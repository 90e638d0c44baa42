#include <lockstep/nn/kernels/cpu/activation_kernels.h>

#include <cmath>

#include <lockstep/base/simd.h>
#include <lockstep/nn/kernels/cpu/vector_math.h>

namespace lockstep::nn::internal {

namespace {

// GELU's tanh form is x·sigmoid(x·(a + b·x²)), which stays accurate where 1 + tanh cancels.
constexpr float kLinear = 1.59576912f;   // 2·sqrt(2/pi)
constexpr float kCubic = 0.0713548163f;  // 0.044715 times that
constexpr float kInverseSqrtTwoPi = 0.398942280f;

// Clamps x to the range in which a derivative has not reached its limit yet (to within 1e-35) and
// no exponential is 0 or infinite. A NaN stays a NaN.
inline float within(float x, float bound) {
  x = x > bound ? bound : x;
  return x < -bound ? -bound : x;
}
inline float magnitude(float x, float bound) {
  const float a = std::fabs(x);
  return a > bound ? bound : a;
}

}  // namespace

LOCKSTEP_SIMD void gelu_tanh(const float* __restrict x, float* __restrict y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i)
    y[i] = (x[i] < -100.0f ? -100.0f : x[i]) /
           (1.0f + vector_exp(-x[i] * (kLinear + kCubic * (x[i] * x[i]))));
}

LOCKSTEP_SIMD void gelu_tanh_backward(const float* __restrict x, const float* __restrict grad,
                                      float* __restrict grad_x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float v = within(x[i], 9.9f);
    const float square = v * v;
    const float e = bounded_exp(-v * (kLinear + kCubic * square));
    const float s = 1.0f / (1.0f + e);
    const float rest = e * s;  // 1 - s, without its rounding error
    grad_x[i] = grad[i] * (s + (v * s) * rest * (kLinear + (3.0f * kCubic) * square));
  }
}

// x·P(X < x) = max(x, 0) - |x|·P(X > |x|): in this form nothing cancels.
LOCKSTEP_SIMD void gelu_erf(const float* __restrict x, float* __restrict y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float a = magnitude(x[i], 13.0f);
    const float tail = normal_tail(a, bounded_exp(-0.5f * (a * a)));
    y[i] = (x[i] < 0.0f ? 0.0f : x[i]) - a * tail;
  }
}

LOCKSTEP_SIMD void gelu_erf_backward(const float* __restrict x, const float* __restrict grad,
                                     float* __restrict grad_x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float a = magnitude(x[i], 13.0f);
    const float exponential = bounded_exp(-0.5f * (a * a));
    const float left = normal_tail(a, exponential) - a * (kInverseSqrtTwoPi * exponential);
    grad_x[i] = grad[i] * (x[i] < 0.0f ? left : 1.0f - left);
  }
}

LOCKSTEP_SIMD void silu_multiply(const float* __restrict gate, const float* __restrict up,
                                 float* __restrict y, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] = gate[i] / (1.0f + vector_exp(-gate[i])) * up[i];
}

LOCKSTEP_SIMD void silu_multiply_backward(const float* __restrict gate, const float* __restrict up,
                                          const float* __restrict grad, float* __restrict grad_gate,
                                          float* __restrict grad_up, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float e = vector_exp(-gate[i]);
    const float s = 1.0f / (1.0f + e);
    const float bounded = within(gate[i], 120.0f);
    const float rest = e > 1.0f ? 1.0f - s : e * s;
    grad_gate[i] = grad[i] * up[i] * (s * (1.0f + bounded * rest));
    grad_up[i] = grad[i] * (gate[i] * s);
  }
}

}  // namespace lockstep::nn::internal
