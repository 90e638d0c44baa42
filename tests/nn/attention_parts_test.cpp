#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include <lockstep/device/autocast.h>
#include <lockstep/mesh/placement/placement.h>
#include <lockstep/nn/context_parallel/ring_attention.h>
#include <lockstep/nn/layers/attention.h>

#include "compare.h"

namespace lockstep::nn {
namespace {

// Keys in three parts: all queries see the first, with the causal mask aligned at its end; only the
// later queries see the others.
struct ByParts {
  static constexpr std::int64_t kQueries = 70, kKeys = 130, kFrom = 30;

  at::Tensor q = random({2, 6, kQueries, 9});
  at::Tensor k = random({2, 3, kKeys, 9});
  at::Tensor v = random({2, 3, kKeys, 9});
  at::Tensor grad = random({2, 6, kQueries, 9});

  void expect_exact(at::ScalarType type, const at::Device& device, double tolerance) const {
    const internal::AttentionTerms causal{.causal = true, .scale = 0.4};
    const internal::AttentionTerms full{.causal = false, .scale = 0.4};
    const auto to = [&](const at::Tensor& x) { return x.to(device, type); };
    const auto q = to(this->q), k = to(this->k), v = to(this->v), grad = to(this->grad);
    const auto late = [](const at::Tensor& x) { return x.narrow(2, kFrom, kQueries - kFrom); };
    const std::vector<mesh::Interval> rest = {{80, 99}, {99, 130}};
    auto result = internal::attend(q, k.narrow(2, 0, 80), v.narrow(2, 0, 80), causal);
    const internal::AttentionResult of_late{late(result.output), late(result.log_sum_exp)};
    for (const auto& part : rest)
      internal::attend_more(of_late, late(q), k.narrow(2, part.begin, part.size()),
                            v.narrow(2, part.begin, part.size()), full);
    const auto zeros = [&](const at::Tensor& x) {
      return at::zeros(x.sizes(), x.options().dtype(internal::sum_type(type)));
    };
    const internal::AttentionGradients found{zeros(q), zeros(k), zeros(v)};
    const auto of_part = [&](const at::Tensor& x, std::int64_t begin, std::int64_t size) {
      return x.narrow(2, begin, size);
    };
    internal::add_gradients({found.q, of_part(found.k, 0, 80), of_part(found.v, 0, 80)}, grad, q,
                            of_part(k, 0, 80), of_part(v, 0, 80), result, causal);
    for (const auto& [begin, end] : rest)
      internal::add_gradients({late(found.q), of_part(found.k, begin, end - begin),
                               of_part(found.v, begin, end - begin)},
                              late(grad), late(q), of_part(k, begin, end - begin),
                              of_part(v, begin, end - begin), of_late, full);

    const auto expected = differentiate(
        [](const Tensors& in) {
          const auto keys = in[1].repeat_interleave(2, 1), values = in[2].repeat_interleave(2, 1);
          const auto query = at::arange(kQueries).unsqueeze(1),
                     key = at::arange(kKeys).unsqueeze(0);
          const auto seen = key.lt(80)
                                .logical_and(key.le(query + 10))
                                .logical_or(key.ge(80).logical_and(query.ge(kFrom)));
          const auto scores = (at::matmul(in[0], keys.transpose(2, 3)) * 0.4)
                                  .masked_fill(seen.logical_not(), -INFINITY);
          return at::matmul(scores.softmax(-1), values);
        },
        {q.to(at::kCPU, at::kDouble), k.to(at::kCPU, at::kDouble), v.to(at::kCPU, at::kDouble)},
        grad.to(at::kCPU, at::kDouble));
    expect_close(result.output, expected[0], tolerance, "result");
    expect_close(found.q, expected[1], tolerance, "gradient of q");
    expect_close(found.k, expected[2], tolerance, "gradient of k");
    expect_close(found.v, expected[3], tolerance, "gradient of v");
  }
};

TEST(AttentionParts, MergeToTheWhole) {
  ByParts().expect_exact(at::kFloat, at::kCPU, 2e-6);
  ByParts().expect_exact(at::kDouble, at::kCPU, 1e-12);
  // The sums are in float; both sides multiply numbers of 8 bits.
  ByParts().expect_exact(at::kBFloat16, at::kCPU, 2e-6);
}

TEST(AttentionParts, MergeOnCuda) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  ByParts().expect_exact(at::kFloat, at::kCUDA, 1e-4);
  ByParts().expect_exact(at::kBFloat16, at::kCUDA, 1e-4);
  ByParts().expect_exact(at::kHalf, at::kCUDA, 1e-4);
}

// Autocast does not round what is between the products.
TEST(AttentionParts, HaveTheSameBitsUnderAutocast) {
  const auto type = at::TensorOptions(at::kBFloat16);
  const auto q = at::randn({1, 2, 40, 8}, type), k = at::randn({1, 2, 40, 8}, type),
             v = at::randn({1, 2, 40, 8}, type);
  const internal::AttentionTerms terms{.causal = true, .scale = 0.5};
  const auto expected = internal::attend(q, k, v, terms);
  const device::Autocast autocast(at::kCPU, at::kBFloat16);
  const auto result = internal::attend(q, k, v, terms);
  EXPECT_TRUE(result.output.equal(expected.output));
  EXPECT_TRUE(result.log_sum_exp.equal(expected.log_sum_exp));
}

// There are more scores than are held in memory at once.
TEST(AttentionParts, OfManyQueries) {
  const auto type = at::TensorOptions(at::kDouble);
  const Tensors in{at::randn({1, 2, 1100, 4}, type), at::randn({1, 2, 1100, 4}, type),
                   at::randn({1, 2, 1100, 4}, type)};
  const auto grad = at::randn({1, 2, 1100, 4}, type);
  const internal::AttentionTerms terms{.causal = true, .scale = 0.5};
  const auto expected = differentiate(
      [](const Tensors& in) { return attention(in[0], in[1], in[2], {.scale = 0.5}); }, in, grad);
  const auto result = internal::attend(in[0], in[1], in[2], terms);
  const internal::AttentionGradients found{at::zeros_like(in[0]), at::zeros_like(in[1]),
                                           at::zeros_like(in[2])};
  internal::add_gradients(found, grad, in[0], in[1], in[2], result, terms);
  expect_close(result.output, expected[0], 1e-12, "result");
  expect_close(found.q, expected[1], 1e-12, "gradient of q");
  expect_close(found.k, expected[2], 1e-12, "gradient of k");
  expect_close(found.v, expected[3], 1e-12, "gradient of v");
}

// Scores are so far apart that one part has all the weight, whichever comes first.
TEST(AttentionParts, MergeWhereOnePartOutweighsTheOther) {
  for (const auto type : {at::kFloat, at::kDouble}) {
    const auto q = at::full({1, 1, 1, 1}, 30.0, type);
    const auto low = at::full({1, 1, 1, 1}, -30.0, type), high = at::full({1, 1, 1, 1}, 30.0, type);
    const internal::AttentionTerms terms{.causal = false, .scale = 1.0};
    for (const bool low_first : {true, false}) {
      const auto& first = low_first ? low : high;
      const auto& second = low_first ? high : low;
      const auto result = internal::attend(q, first, first, terms);
      internal::attend_more(result, q, second, second, terms);
      EXPECT_EQ(result.output.item<double>(), 30.0);
      EXPECT_EQ(result.log_sum_exp.item<double>(), 900.0);
    }
  }
}

}  // namespace
}  // namespace lockstep::nn
