// Loops over contiguous float32 values for GELU, SwiGLU's gate, and their derivatives. Each result
// depends on its own element only, so a caller may cut the range anywhere.
#pragma once

#include <cstdint>

namespace lockstep::nn::internal {

// The least number of elements for another thread: they take some 20 µs, well above the cost of
// waking it.
inline constexpr std::int64_t kActivationGrain = 16384;

// Inputs: `count` values each. `grad` is the gradient of the output.
void gelu_tanh(const float* x, float* y, std::int64_t count);
void gelu_tanh_backward(const float* x, const float* grad, float* grad_x, std::int64_t count);
void gelu_erf(const float* x, float* y, std::int64_t count);
void gelu_erf_backward(const float* x, const float* grad, float* grad_x, std::int64_t count);

void silu_multiply(const float* gate, const float* up, float* y, std::int64_t count);
void silu_multiply_backward(const float* gate, const float* up, const float* grad, float* grad_gate,
                            float* grad_up, std::int64_t count);

}  // namespace lockstep::nn::internal
