// Layer norm and RMS norm over rows on CUDA, forward and backward, where wished with the sum that a
// residual connection makes before them. In builds whose LibTorch has CUDA.
//
// Rows lie one after the other, at addresses that are multiples of 16; the arithmetic is in float.
// Everything is put on the stream, and nothing waits; whether it could be started,
// cudaGetLastError() says.
#pragma once

#include <cstddef>
#include <cstdint>

#include <lockstep/nn/kernels/cuda/element.h>

struct CUstream_st;

namespace lockstep::nn::cuda {

enum class NormKind : std::uint8_t {
  layer,  // (x - mean) / sqrt(variance + eps) · weight + bias
  rms,    // x / sqrt(mean of squares + eps) · weight
};

struct NormShape {
  NormKind kind = NormKind::layer;
  std::int64_t rows = 0;
  std::int64_t width = 0;
  float eps = 0;
};

// Rows that the kernels take: any multiple of 4 up to this.
constexpr std::int64_t kWidestNorm = 8192;
inline bool norm_takes(std::int64_t width) {
  return width > 0 && width % 4 == 0 && width <= kWidestNorm;
}

struct NormForward {
  const void* x = nullptr;  // [rows, width] of x_type
  Element x_type = Element::float32;
  // Added to x before it is normalised; where it is null, x is normalised as it is.
  const void* update = nullptr;  // [rows, width] of y_type
  void* sum = nullptr;           // [rows, width] of x_type: x + update, where there is one
  const float* weight = nullptr;
  const float* bias = nullptr;  // of a layer norm; null for none
  void* y = nullptr;            // [rows, width] of y_type: that of x, or where x is float any
  Element y_type = Element::float32;
  // [rows], for backward; no mean of RMS norms.
  float* mean = nullptr;
  float* inverse = nullptr;
};
void norm_forward(const NormShape& shape, const NormForward& what, CUstream_st* stream);

struct NormBackward {
  const void* y_gradient = nullptr;  // of y_type
  Element y_type = Element::float32;
  const void* x = nullptr;  // what was normalised, of x_type
  Element x_type = Element::float32;
  const float* weight = nullptr;
  const float* mean = nullptr;
  const float* inverse = nullptr;
  // What comes to the sum from elsewhere, of x_type; null for nothing.
  const void* sum_gradient = nullptr;
  void* x_gradient = nullptr;        // of x_type
  void* update_gradient = nullptr;   // the same as y_type; null where nobody asks
  float* weight_gradient = nullptr;  // [width]
  float* bias_gradient = nullptr;    // null where there is no bias
  float* scratch = nullptr;          // norm_scratch_floats() of them
};
std::size_t norm_scratch_floats(const NormShape& shape);
void norm_backward(const NormShape& shape, const NormBackward& what, CUstream_st* stream);

}  // namespace lockstep::nn::cuda
