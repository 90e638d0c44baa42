// How the kernels' tests compare: our float32 results with the same in float64, composed of ATen's
// operators and differentiated by autograd.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "../device/threads.h"

namespace lockstep::nn {

using Tensors = std::vector<at::Tensor>;
using Computation = std::function<at::Tensor(const Tensors&)>;

// Every test draws the same numbers in every run.
class SeedEachTest : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { at::manual_seed(1); }
};
inline const bool seeded = [] {
  testing::UnitTest::GetInstance()->listeners().Append(new SeedEachTest);
  return true;
}();

inline at::Tensor random(at::IntArrayRef shape, double scale = 1.0) {
  return at::randn(shape, at::TensorOptions(at::kFloat)) * scale;
}

// Compares within `tolerance` of the largest value.
inline void expect_close(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                         const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (actual.numel() == 0) return;
  const auto wide = actual.detach().to(at::kCPU, at::kDouble);
  const auto reference = expected.detach().to(at::kCPU, at::kDouble);
  const double largest = std::max(1.0, reference.abs().max().item<double>());
  const double error = (wide - reference).abs().max().item<double>();
  EXPECT_LE(error, tolerance * largest) << what;
}

// Returns the result, then the gradient of each input, given `grad` for the result.
inline Tensors differentiate(const Computation& computation, const Tensors& inputs,
                             const at::Tensor& grad) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_());
  Tensors results{computation(leaves)};
  const auto weights = grad.to(results[0].device(), results[0].scalar_type());
  for (auto& gradient : torch::autograd::grad({results[0]}, leaves, {weights}))
    results.push_back(gradient);
  return results;
}

// Compares our computation on `inputs` with the reference on the same numbers in float64.
inline void expect_matches(const Computation& ours, const Computation& reference,
                           const Tensors& inputs, double tolerance, const std::string& what) {
  Tensors wide;
  for (const auto& input : inputs) wide.push_back(input.detach().to(at::kCPU, at::kDouble));
  const auto grad = at::randn(reference(wide).sizes(), at::TensorOptions(at::kFloat));
  const auto expected = differentiate(reference, wide, grad);
  const auto actual = differentiate(ours, inputs, grad);
  for (std::size_t i = 0; i < expected.size(); ++i)
    expect_close(actual[i], expected[i], tolerance,
                 what + (i == 0 ? ", result" : ", gradient " + std::to_string(i)));
}

inline void expect_same_bits(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", tensor " << i;
}

// Compares two runs on one thread and one on two: the bits must be the same.
inline void expect_repeatable(const Computation& computation, const Tensors& inputs,
                              const at::Tensor& grad, const std::string& what) {
  Tensors first, again, parallel;
  {
    const Threads threads(1);
    first = differentiate(computation, inputs, grad);
    again = differentiate(computation, inputs, grad);
  }
  {
    const Threads threads(2);
    parallel = differentiate(computation, inputs, grad);
  }
  expect_same_bits(first, again, what + ", again");
  expect_same_bits(first, parallel, what + ", two threads");
}

// The error from differentiating twice.
inline std::string double_backward_error(const Computation& computation, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_());
  const auto result = computation(leaves).sum();
  try {
    torch::autograd::grad({result}, leaves, {}, /*retain_graph=*/true, /*create_graph=*/true);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace lockstep::nn
