// Compares the CUDA kernels with float64, for sizes that fit them well and badly. Gradients and
// values of 16 bits are as exact as their rounding.
#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <spdlog/fmt/fmt.h>

#include <lockstep/device/autocast.h>
#include <lockstep/nn/layers/activations.h>
#include <lockstep/nn/layers/attention.h>
#include <lockstep/nn/layers/cross_entropy.h>
#include <lockstep/nn/layers/norms.h>
#include <lockstep/nn/layers/rotary.h>

#include "compare.h"

namespace lockstep::nn {
namespace {

class CudaKernels : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  }
};

struct Precision {
  at::ScalarType type;
  double tolerance;
  const char* name;
};
constexpr Precision kPrecisions[] = {
    {at::kFloat, 2e-5, "float"}, {at::kHalf, 4e-3, "half"}, {at::kBFloat16, 3e-2, "bfloat16"}};

Tensors there(const Tensors& tensors, at::ScalarType type) {
  Tensors moved;
  for (const at::Tensor& tensor : tensors) moved.push_back(tensor.to(at::kCUDA, type));
  return moved;
}

at::Tensor plain_rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  return x * (x.square().mean(-1, true) + eps).rsqrt() * weight;
}

TEST_F(CudaKernels, NormsOfAnyShape) {
  constexpr double kEps = 1e-5;
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t width : {4, 20, 768, 1028, 2048, 4100, 8192, 7, 9000})
      for (const std::int64_t rows : {1, 3, 1500}) {
        const std::string what = fmt::format("{} {} x {}", name, rows, width);
        const Tensors inputs =
            there({random({rows, width}, 2.0) + 3.0, random({width}), random({width})}, type);
        expect_matches(
            [&](const Tensors& in) {
              return layer_norm(in[0], {.weight = in[1], .bias = in[2], .eps = kEps});
            },
            [&](const Tensors& in) { return at::layer_norm(in[0], {width}, in[1], in[2], kEps); },
            inputs, tolerance * 3, "layer norm, " + what);
        expect_matches(
            [&](const Tensors& in) { return rms_norm(in[0], {.weight = in[1], .eps = kEps}); },
            [&](const Tensors& in) { return plain_rms_norm(in[0], in[1], kEps); },
            {inputs[0], inputs[1]}, tolerance * 3, "RMS norm, " + what);
      }
}

// Kernels that read several elements at once must not do so if the memory begins at an odd place.
TEST_F(CudaKernels, NormsOfMemoryThatBeginsAnywhere) {
  constexpr std::int64_t kRows = 5, kWidth = 768;
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t offset : {1, 2, 3}) {
      const Tensors inputs =
          there({random({offset + kRows * kWidth}), random({offset + kWidth})}, type);
      const auto rows = [&](const Tensors& in) {
        return in[0].slice(0, offset).view({kRows, kWidth});
      };
      const auto weight = [&](const Tensors& in) { return in[1].slice(0, offset); };
      expect_matches(
          [&](const Tensors& in) {
            return rms_norm(rows(in), {.weight = weight(in), .eps = 1e-5});
          },
          [&](const Tensors& in) { return plain_rms_norm(rows(in), weight(in), 1e-5); }, inputs,
          tolerance * 3, fmt::format("RMS norm, {}, {} elements in", name, offset));
      expect_matches(
          [&](const Tensors& in) {
            return layer_norm(rows(in), {.weight = weight(in), .eps = 1e-5});
          },
          [&](const Tensors& in) {
            return at::layer_norm(rows(in), {kWidth}, weight(in), {}, 1e-5);
          },
          inputs, tolerance * 3, fmt::format("layer norm, {}, {} elements in", name, offset));
    }
}

// Both results are used, so gradients come from both.
TEST_F(CudaKernels, NormsOfSums) {
  constexpr double kEps = 1e-5;
  const auto both = [](const SumAndNorm& made) {
    return at::cat({made.sum.to(at::kFloat) * 0.5, made.norm.to(at::kFloat)}, -1);
  };
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t width : {8, 768, 2048, 7})
      for (const std::int64_t rows : {1, 1100}) {
        const std::string what = fmt::format("{} {} x {}", name, rows, width);
        // The sum is float and the update has 16 bits, as under autocast.
        const Tensors inputs = {random({rows, width}).cuda(),
                                random({rows, width}).to(at::kCUDA, type), random({width}).cuda(),
                                random({width}).cuda()};
        const auto ours = [&](bool layer) {
          return [&, layer, type = type](const Tensors& in) {
            std::optional<device::Autocast> cast;
            if (type != at::kFloat) cast.emplace(at::kCUDA, type);
            return both(
                layer ? add_layer_norm(in[0], in[1], {.weight = in[2], .bias = in[3], .eps = kEps})
                      : add_rms_norm(in[0], in[1], {.weight = in[2], .eps = kEps}));
          };
        };
        const auto plain = [&](bool layer) {
          return [=](const Tensors& in) {
            const at::Tensor sum = in[0] + in[1];
            const at::Tensor norm = layer ? at::layer_norm(sum, {width}, in[2], in[3], kEps)
                                          : plain_rms_norm(sum, in[2], kEps);
            return at::cat({sum * 0.5, norm}, -1);
          };
        };
        expect_matches(ours(true), plain(true), inputs, tolerance * 3, "layer norm, " + what);
        expect_matches(ours(false), plain(false), {inputs[0], inputs[1], inputs[2]}, tolerance * 3,
                       "RMS norm, " + what);
      }
}

TEST_F(CudaKernels, CrossEntropyOfAnyVocabulary) {
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t vocabulary : {1, 7, 100, 4096, 4099, 50257})
      for (const std::int64_t rows : {1, 5, 130}) {
        const std::string what = fmt::format("{} {} x {}", name, rows, vocabulary);
        at::Tensor targets = at::randint(vocabulary, {rows}, at::kLong);
        if (rows > 1) targets[1] = -100;
        const Tensors inputs = there({random({rows, 16}), random({vocabulary, 16})}, type);
        expect_matches(
            [&](const Tensors& in) {
              return linear_cross_entropy(in[0], in[1], targets.cuda()).sum;
            },
            [&](const Tensors& in) {
              return at::cross_entropy_loss(at::mm(in[0], in[1].t()), targets, {},
                                            at::Reduction::Sum, -100);
            },
            inputs, tolerance, what);
      }
}

// There are more logits than are held at once: rows come out as they do among fewer rows, and the
// weight's gradient as their sum.
TEST_F(CudaKernels, CrossEntropyOfSeveralBlocks) {
  constexpr std::int64_t kRows = 4 * 8192, kWidth = 16, kVocabulary = 50257;
  const at::Tensor hidden = random({kRows, kWidth}).to(at::kCUDA, at::kBFloat16).requires_grad_();
  const at::Tensor weight = random({kVocabulary, kWidth}).to(at::kCUDA, at::kBFloat16);
  const at::Tensor whole = weight.clone().requires_grad_(), parts = weight.clone().requires_grad_();
  const at::Tensor targets = at::randint(kVocabulary, {kRows}, at::kLong).cuda();
  const at::Tensor loss = linear_cross_entropy(hidden, whole, targets).sum;
  loss.backward();
  const at::Tensor gradient = hidden.grad().clone();
  hidden.mutable_grad() = at::Tensor();
  double sum = 0;
  for (std::int64_t first = 0; first < kRows; first += kRows / 4) {
    const auto rows = [&](const at::Tensor& all) { return all.narrow(0, first, kRows / 4); };
    const at::Tensor part = linear_cross_entropy(rows(hidden), parts, rows(targets)).sum;
    part.backward();
    sum += part.item<double>();
  }
  EXPECT_NEAR(loss.item<double>() / sum, 1, 1e-5);
  EXPECT_TRUE(at::allclose(gradient, hidden.grad(), 1e-2, 1e-4));
  EXPECT_TRUE(at::allclose(whole.grad(), parts.grad(), 5e-2, 5e-2));
}

// Scales the loss as a loss scale does, which keeps small gradients from becoming 0.
TEST_F(CudaKernels, CrossEntropyTimesALossScale) {
  const at::Tensor targets = at::randint(1000, {70}, at::kLong);
  expect_matches(
      [&](const Tensors& in) {
        return linear_cross_entropy(in[0], in[1], targets.cuda()).sum * 1024.0;
      },
      [&](const Tensors& in) {
        return at::cross_entropy_loss(at::mm(in[0], in[1].t()), targets, {}, at::Reduction::Sum) *
               1024.0;
      },
      there({random({70, 16}), random({1000, 16})}, at::kHalf), 4e-3, "half");
}

// Under autocast a function of our own gets float weights and computes products of 16 bits.
TEST_F(CudaKernels, CrossEntropyUnderAutocast) {
  const at::Tensor targets = at::randint(1000, {70}, at::kLong);
  expect_matches(
      [&](const Tensors& in) {
        const device::Autocast cast(at::kCUDA, at::kBFloat16);
        return linear_cross_entropy(in[0], in[1], targets.cuda()).sum;
      },
      [&](const Tensors& in) {
        return at::cross_entropy_loss(at::mm(in[0], in[1].t()), targets, {}, at::Reduction::Sum);
      },
      {random({70, 16}).cuda(), random({1000, 16}).cuda()}, 3e-2, "autocast");
}

// A logit of -inf is a word that cannot occur; a nan is an error that must show.
TEST_F(CudaKernels, CrossEntropyOfOddNumbers) {
  const double inf = std::numeric_limits<double>::infinity();
  at::Tensor hidden = at::ones({3, 1}, at::kCUDA).requires_grad_();
  const at::Tensor weight = at::tensor({0.0, 1.0, -inf}).to(at::kFloat).view({3, 1}).cuda();
  const at::Tensor targets = at::tensor({0, 1, 0}).to(at::kLong).cuda();
  const at::Tensor loss = linear_cross_entropy(hidden, weight, targets).sum;
  EXPECT_NEAR(loss.item<double>(), 3 * std::log(1 + std::exp(1.0)) - 1, 1e-5);
  const at::Tensor bad = weight * std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(std::isnan(linear_cross_entropy(hidden, bad, targets).sum.item<double>()));
}

TEST_F(CudaKernels, RotaryPositions) {
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t head_dim : {8, 64, 128, 6, 20})
      for (const bool apart : {false, true}) {
        const std::int64_t heads = 3, length = 17;
        Rotary here(head_dim, 64, 1e4), rotary(head_dim, 64, 1e4);
        // The heads are views of one product for queries and keys.
        const auto split = [&](const at::Tensor& x) {
          const at::Tensor part = apart ? x.narrow(-1, heads * head_dim, heads * head_dim) : x;
          return part.unflatten(-1, {heads, head_dim}).transpose(1, 2);
        };
        const Tensors inputs =
            there({random({2, length, (apart ? 2 : 1) * heads * head_dim})}, type);
        expect_matches([&](const Tensors& in) { return rotary.apply(split(in[0]), 5); },
                       [&](const Tensors& in) { return here.apply(split(in[0]), 5); }, inputs,
                       tolerance, fmt::format("{} {} {}", name, head_dim, apart));
      }
}

TEST_F(CudaKernels, SiluMultiplyOfAnyCount) {
  for (const auto& [type, tolerance, name] : kPrecisions)
    for (const std::int64_t count : {1, 7, 8, 100003})
      for (const std::int64_t skipped : {0, 1}) {
        const Tensors inputs = there({random({count + skipped}), random({count + skipped})}, type);
        const auto part = [&](const at::Tensor& x) { return x.narrow(0, skipped, count); };
        expect_matches([&](const Tensors& in) { return silu_multiply(part(in[0]), part(in[1])); },
                       [&](const Tensors& in) { return at::silu(part(in[0])) * part(in[1]); },
                       inputs, tolerance, fmt::format("{} {} from {}", name, count, skipped));
      }
}

TEST_F(CudaKernels, AttentionOfGroupedQueries) {
  for (const std::int64_t length : {1, 33, 128}) {
    const Tensors inputs =
        there({random({2, 6, length, 64}), random({2, 2, length, 64}), random({2, 2, length, 64})},
              at::kBFloat16);
    expect_matches(
        [&](const Tensors& in) { return attention(in[0], in[1], in[2], {.causal = true}); },
        [&](const Tensors& in) {
          const at::Tensor k = in[1].repeat_interleave(3, 1), v = in[2].repeat_interleave(3, 1);
          at::Tensor scores = at::matmul(in[0], k.transpose(2, 3)) / 8.0;
          const at::Tensor seen = at::ones({length, length}, at::kBool).tril();
          scores = scores.masked_fill(seen.logical_not(), -1e30);
          return at::matmul(scores.softmax(-1), v);
        },
        inputs, 3e-2, fmt::format("{} tokens", length));
  }
}

}  // namespace
}  // namespace lockstep::nn
