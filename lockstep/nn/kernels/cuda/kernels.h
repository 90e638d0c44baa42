// lockstep::nn's kernels on CUDA, in builds whose LibTorch has it.
//
// They take memory of the current device and compute in float. Each is put on the stream without
// waiting; cudaGetLastError() says whether it could be started.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace lockstep::nn::cuda {

enum class Element : std::uint8_t { float32, float16, bfloat16 };

// ---- Softmax and cross-entropy of a block of logits, which become their gradient ----

struct LogitBlock {
  void* logits = nullptr;  // [rows, vocabulary], one row after the other
  Element type = Element::float32;
  const std::int64_t* targets = nullptr;  // [rows]
  std::int64_t rows = 0;
  std::int64_t vocabulary = 0;
  std::int64_t ignore_index = 0;
};

// The loss of each row: 0 if its target is ignore_index, nan if the target is outside the
// vocabulary. With `gradients` the logits become softmax - one_hot(target), and 0 in rows that are
// ignored.
void softmax_cross_entropy(const LogitBlock& block, float* losses, bool gradients,
                           CUstream_st* stream);

// The same in two functions, which leave the logits as they are.
struct RowLosses {
  float* losses = nullptr;  // [rows], 0 if the target is ignore_index
  // [rows], for backward: the largest logit, and 1 / the sum of exponentials relative to it.
  float* largest = nullptr;
  float* inverse = nullptr;
};
// A target outside the vocabulary fails an assertion on the device.
void cross_entropy_forward(const LogitBlock& block, const RowLosses& rows, CUstream_st* stream);
// (softmax - one_hot(target)) · factors[row], in the logits' type. Logits and gradient begin at
// multiples of 16 bytes.
void cross_entropy_backward(const LogitBlock& block, const RowLosses& rows, const float* factors,
                            void* gradient, CUstream_st* stream);

// ---- Adding a bias to a product's result, in place ----

struct BiasedRows {
  void* values = nullptr;  // [rows, width], at a multiple of 16 bytes
  Element type = Element::bfloat16;
  std::int64_t rows = 0;
  std::int64_t width = 0;  // a width for which bias_takes() is true
};
inline bool bias_takes(std::int64_t width) { return width > 0 && width % 8 == 0; }
// Each sum is rounded once, to the type of the values.
void add_bias(const BiasedRows& rows, const float* bias, CUstream_st* stream);

// ---- Layer norm and RMS norm, with the sum of a residual connection before if wished ----
//
// Rows lie one after the other, at addresses that are multiples of 16.

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

// The kernels take rows whose width is a multiple of 4 and at most this.
constexpr std::int64_t kWidestNorm = 8192;
inline bool norm_takes(std::int64_t width) {
  return width > 0 && width % 4 == 0 && width <= kWidestNorm;
}

struct NormForward {
  const void* x = nullptr;  // [rows, width] of x_type
  Element x_type = Element::float32;
  // Added to x before the norm; if null, the norm is of x itself.
  const void* update = nullptr;  // [rows, width] of y_type
  void* sum = nullptr;           // [rows, width] of x_type: x + update; unused without an update
  const float* weight = nullptr;
  const float* bias = nullptr;  // only of a layer norm; null for none
  void* y = nullptr;            // [rows, width] of y_type, which is x's type; if x is float, any
  Element y_type = Element::float32;
  // [rows], for backward; an RMS norm has no mean.
  float* mean = nullptr;
  float* inverse = nullptr;
};
void norm_forward(const NormShape& shape, const NormForward& what, CUstream_st* stream);

struct NormBackward {
  const void* y_gradient = nullptr;  // of y_type
  Element y_type = Element::float32;
  const void* x = nullptr;  // the norm's input, of x_type
  Element x_type = Element::float32;
  const float* weight = nullptr;
  const float* mean = nullptr;
  const float* inverse = nullptr;
  // The gradient of the sum from its other uses, of x_type; null for none.
  const void* sum_gradient = nullptr;
  void* x_gradient = nullptr;        // of x_type
  void* update_gradient = nullptr;   // the same as y_type; null if it is not wanted
  float* weight_gradient = nullptr;  // [width]
  float* bias_gradient = nullptr;    // null without a bias
  float* scratch = nullptr;          // norm_scratch_floats() floats
};
std::size_t norm_scratch_floats(const NormShape& shape);
void norm_backward(const NormShape& shape, const NormBackward& what, CUstream_st* stream);

// ---- Rotary positions ----

// The heads of tokens: [batch, heads, length, 2 · half]. Elements of a head lie next to each other;
// the other strides are in elements. Addresses, strides and `half` are multiples of 4 elements.
struct RotaryShape {
  Element type = Element::float32;
  std::int64_t batch = 0, heads = 0, length = 0, half = 0;
  std::int64_t batch_stride = 0, head_stride = 0, token_stride = 0;
};

// Turns x by the angles whose cosines and sines are given, [length, half] each; with direction =
// -1, turns it back. The result is [batch, length, heads, 2 · half], one after the other.
void turn(const RotaryShape& shape, const void* x, const float* cosines, const float* sines,
          float direction, void* result, CUstream_st* stream);

// ---- silu(gate) · up ----
//
// All tensors have `count` elements of the type, one after the other.

void silu_multiply(Element type, std::int64_t count, const void* gate, const void* up, void* result,
                   CUstream_st* stream);
void silu_multiply_backward(Element type, std::int64_t count, const void* gate, const void* up,
                            const void* gradient, void* gate_gradient, void* up_gradient,
                            CUstream_st* stream);

}  // namespace lockstep::nn::cuda
