// The row work of softmax, in attention and cross-entropy: float32 rows, sums taken in 16 lanes
// that are added in one fixed order, so that a row's bits depend on nothing but the row.
#pragma once

#include <cstdint>

namespace lockstep::nn::internal {

// max over i of factor·row[i]; -inf of no elements. What it gives for rows with NaN is unspecified:
// exponentials of them are NaN whatever is subtracted.
float row_max(const float* row, std::int64_t count, float factor);

// out[i] = e^(factor·row[i] - shift); gives their sum. `shift` is the row's largest product or its
// log-sum-exp: what is e^-64 and less of that becomes 0. `out` may be `row`.
float row_exp(const float* row, float* out, std::int64_t count, float factor, float shift);

// sum over i of e^(row[i] - shift), in the same way
float row_exp_sum(const float* row, std::int64_t count, float shift);

// row[i] *= factor
void row_scale(float* row, std::int64_t count, float factor);

// sum over i of a[i]·b[i]
float row_dot(const float* a, const float* b, std::int64_t count);

// From probabilities and the gradient of them, in place, the gradient of the scores:
// grad[i] = factor·probabilities[i]·(grad[i] - mean), mean being sum over i of the two's products.
void row_softmax_backward(const float* probabilities, float* grad, std::int64_t count, float mean,
                          float factor);

}  // namespace lockstep::nn::internal
