#include <lockstep/nn/kernels/cpu/softmax_kernels.h>

#include <algorithm>
#include <bit>
#include <limits>

#include <lockstep/base/simd.h>
#include <lockstep/nn/kernels/cpu/vector_math.h>

namespace lockstep::nn::internal {

namespace {

constexpr std::int64_t kLanes = 16;

// Maps floats to integers of the same order; NaNs come above or below all other numbers.
inline std::int32_t in_order(float value) {
  const auto bits = std::bit_cast<std::int32_t>(value);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

}  // namespace

LOCKSTEP_SIMD float row_max(const float* __restrict row, std::int64_t count, float factor) {
  // Compares integers of the same order: the compiler may take their maximum in any lanes, which it
  // may not do with floats.
  std::int32_t largest = in_order(-std::numeric_limits<float>::infinity());
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t value = in_order(factor * row[i]);
    largest = value > largest ? value : largest;
  }
  return std::bit_cast<float>(largest ^ ((largest >> 31) & 0x7FFFFFFF));
}

namespace {

LOCKSTEP_SIMD float piece_exp(const float* row, float* out, std::int64_t count, float factor,
                              float shift) {
  for (std::int64_t i = 0; i < count; ++i) {
    // Values this far below the row's largest, which is 1, count as 0. They would become denormal
    // numbers in later products, and those slow a matrix product down a hundredfold.
    const float x = factor * row[i] - shift;
    const float value = bounded_exp(x);
    out[i] = x < -64.0f ? 0.0f : value;
  }
  float lanes[kLanes] = {};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += out[i + lane];
  for (std::int64_t i = whole; i < count; ++i) lanes[i - whole] += out[i];
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// A row is summed in pieces, whose sums are added in float64: float32 would lose a digit or two
// over a vocabulary of 50257.
constexpr std::int64_t kPiece = 1024;

}  // namespace

float row_exp(const float* row, float* out, std::int64_t count, float factor, float shift) {
  double sum = 0.0;
  for (std::int64_t begin = 0; begin < count; begin += kPiece)
    sum += piece_exp(row + begin, out + begin, std::min(kPiece, count - begin), factor, shift);
  return static_cast<float>(sum);
}

float row_exp_sum(const float* row, std::int64_t count, float shift) {
  float exponentials[kPiece];
  double sum = 0.0;
  for (std::int64_t begin = 0; begin < count; begin += kPiece)
    sum += piece_exp(row + begin, exponentials, std::min(kPiece, count - begin), 1.0f, shift);
  return static_cast<float>(sum);
}

LOCKSTEP_SIMD void row_scale(float* row, std::int64_t count, float factor) {
  for (std::int64_t i = 0; i < count; ++i) row[i] *= factor;
}

LOCKSTEP_SIMD float row_dot(const float* __restrict a, const float* __restrict b,
                            std::int64_t count) {
  float lanes[kLanes] = {};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  for (std::int64_t i = whole; i < count; ++i) lanes[i - whole] += a[i] * b[i];
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2)
    for (std::int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

LOCKSTEP_SIMD void row_softmax_backward(const float* __restrict probabilities,
                                        float* __restrict grad, std::int64_t count, float mean,
                                        float factor) {
  for (std::int64_t i = 0; i < count; ++i) grad[i] = factor * (probabilities[i] * (grad[i] - mean));
}

}  // namespace lockstep::nn::internal
