// Softmax's work on float32 rows, for attention and cross-entropy. Sums are taken in 16 lanes that
// are added in one fixed order, so a row's bits depend on nothing but the row.
#pragma once

#include <cstdint>

namespace lockstep::nn::internal {

// The maximum over i of factor·row[i]; -inf without elements. The result for rows with NaN is
// unspecified: their exponentials are NaN whatever is subtracted.
float row_max(const float* row, std::int64_t count, float factor);

// out[i] = e^(factor·row[i] - shift); returns their sum. `shift` is the row's largest product or
// its log-sum-exp; values below e^-64 become 0. `out` may be `row`.
float row_exp(const float* row, float* out, std::int64_t count, float factor, float shift);

// The sum over i of e^(row[i] - shift), computed in the same way.
float row_exp_sum(const float* row, std::int64_t count, float shift);

// row[i] *= factor
void row_scale(float* row, std::int64_t count, float factor);

// The sum over i of a[i]·b[i].
float row_dot(const float* a, const float* b, std::int64_t count);

// Turns the gradient of probabilities into that of the scores, in place: grad[i] =
// factor·probabilities[i]·(grad[i] - mean), where `mean` is the sum over i of
// probabilities[i]·grad[i].
void row_softmax_backward(const float* probabilities, float* grad, std::int64_t count, float mean,
                          float factor);

}  // namespace lockstep::nn::internal
