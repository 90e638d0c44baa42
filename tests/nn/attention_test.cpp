#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <lockstep/nn/layers/attention.h>

#include "../base/errors.h"
#include "compare.h"

namespace lockstep::nn {
namespace {

using testing::HasSubstr;

struct Shape {
  std::int64_t batch = 2;
  std::int64_t heads = 2;
  std::int64_t kv_heads = 2;
  std::int64_t length = 5;
  std::int64_t keys = 5;
  std::int64_t head_dim = 8;

  std::string name() const {
    return fmt::format("batch {} heads {}/{} length {} keys {} head_dim {}", batch, heads, kv_heads,
                       length, keys, head_dim);
  }
  Tensors inputs() const {
    return {random({batch, heads, length, head_dim}), random({batch, kv_heads, keys, head_dim}),
            random({batch, kv_heads, keys, head_dim})};
  }
};

// The definition, with the matrix of scores and the mask written out.
Computation plain(const AttentionOptions& options) {
  return [options](const Tensors& in) {
    const auto group = in[0].size(1) / in[1].size(1);
    const auto keys = in[1].repeat_interleave(group, 1);
    const auto values = in[2].repeat_interleave(group, 1);
    const auto scale = options.scale.value_or(1.0 / std::sqrt(in[0].size(3)));
    auto scores = at::matmul(in[0], keys.transpose(2, 3)) * scale;
    if (options.causal) {
      const auto queries = at::arange(in[0].size(2)).unsqueeze(1) + (keys.size(2) - in[0].size(2));
      const auto unseen = at::arange(keys.size(2)).unsqueeze(0).gt(queries);
      scores = scores.masked_fill(unseen, -std::numeric_limits<double>::infinity());
    }
    return at::matmul(scores.softmax(-1), values);
  };
}

Computation blocked(const AttentionOptions& options) {
  return [options](const Tensors& in) { return attention(in[0], in[1], in[2], options); };
}

void expect_exact(const Shape& shape, const AttentionOptions& options) {
  expect_matches(blocked(options), plain(options), shape.inputs(), 2e-6,
                 shape.name() + (options.causal ? " causal" : ""));
}

TEST(Attention, MatchesTheDefinitionForEveryLength) {
  for (const std::int64_t length : {1, 7, 33, 64, 65, 257})
    for (const bool causal : {true, false})
      expect_exact({.length = length, .keys = length}, {.causal = causal});
}

TEST(Attention, MatchesTheDefinitionForEveryHeadDim) {
  for (const std::int64_t head_dim : {1, 8, 33, 64, 128})
    for (const bool causal : {true, false})
      expect_exact({.batch = 1, .length = 70, .keys = 70, .head_dim = head_dim},
                   {.causal = causal});
}

TEST(Attention, SharesKeysAmongHeads) {
  expect_exact({.heads = 8, .kv_heads = 2, .length = 33, .keys = 33}, {});
  expect_exact({.heads = 6, .kv_heads = 1, .length = 7, .keys = 7}, {.causal = false});
}

TEST(Attention, IsAlignedAtTheLastKey) {
  expect_exact({.length = 1, .keys = 33}, {});
  expect_exact({.length = 3, .keys = 70}, {});
  expect_exact({.length = 70, .keys = 133}, {});
  expect_exact({.length = 9, .keys = 4}, {.causal = false});
}

// There are more keys than a block has, so the sums are rescaled when a larger score turns up.
TEST(Attention, MatchesTheDefinitionOverSeveralBlocksOfKeys) {
  expect_exact({.batch = 1, .heads = 1, .kv_heads = 1, .length = 1100, .keys = 1100}, {});
  expect_exact({.batch = 1, .heads = 1, .kv_heads = 1, .length = 70, .keys = 1537}, {});
  // Scores grow along the keys, beyond what e^x can hold.
  auto inputs = Shape{.batch = 1, .length = 3, .keys = 1537}.inputs();
  inputs[1] *= at::linspace(0.1, 40.0, 1537, at::kFloat).view({1, 1, 1537, 1});
  expect_matches(blocked({.causal = false}), plain({.causal = false}), inputs, 1e-4, "growing");
}

TEST(Attention, TakesAScale) {
  expect_exact({.length = 33, .keys = 33}, {.scale = 0.3});
  expect_exact({.length = 7, .keys = 7}, {.causal = false, .scale = -1.5});
}

TEST(Attention, ReadsViewsOfOneProjection) {
  const std::int64_t batch = 2, length = 40, heads = 3, head_dim = 8;
  const auto split = [&](const Tensors& in) {
    Tensors parts;
    for (const auto& part : in[0].chunk(3, 2))
      parts.push_back(part.view({batch, length, heads, head_dim}).transpose(1, 2));
    return parts;
  };
  expect_matches([&](const Tensors& in) { return blocked({})(split(in)); },
                 [&](const Tensors& in) { return plain({})(split(in)); },
                 {random({batch, length, 3 * heads * head_dim})}, 2e-6, "one projection");
}

TEST(Attention, ReadsAnyStrides) {
  const auto transposed = [](const Tensors& in) {
    return Tensors{in[0].transpose(2, 3), in[1].transpose(2, 3), in[2].transpose(2, 3)};
  };
  const auto expanded = [](const Tensors& in) {
    return Tensors{in[0].expand({2, 3, 8, 8}), in[1].expand({2, 3, 8, 8}), in[2]};
  };
  const Tensors inputs{random({2, 3, 8, 8}), random({2, 3, 8, 8}), random({2, 3, 8, 8})};
  expect_matches([&](const Tensors& in) { return blocked({})(transposed(in)); },
                 [&](const Tensors& in) { return plain({})(transposed(in)); }, inputs, 2e-6,
                 "transposed");
  expect_matches([&](const Tensors& in) { return blocked({})(expanded(in)); },
                 [&](const Tensors& in) { return plain({})(expanded(in)); },
                 {random({2, 3, 1, 8}), random({1, 1, 8, 8}), random({2, 3, 8, 8})}, 2e-6,
                 "expanded");
}

TEST(Attention, TakesAnEmptyBatch) {
  const Shape shape{.batch = 0};
  const auto results = differentiate(blocked({}), shape.inputs(), at::zeros({0, 2, 5, 8}));
  EXPECT_EQ(results[0].sizes(), at::IntArrayRef({0, 2, 5, 8}));
  EXPECT_EQ(results[2].sizes(), at::IntArrayRef({0, 2, 5, 8}));
  const auto nothing = Shape{.keys = 0}.inputs();
  EXPECT_EQ(
      attention(nothing[0], nothing[1], nothing[2], {.causal = false}).abs().sum().item<float>(),
      0.0f);
}

TEST(Attention, LiesInMemoryByPosition) {
  const auto in = Shape{.length = 9, .keys = 9}.inputs();
  for (const auto type : {at::kFloat, at::kDouble})
    EXPECT_TRUE(
        attention(in[0].to(type), in[1].to(type), in[2].to(type)).transpose(1, 2).is_contiguous());
}

TEST(Attention, GivesTheSameBitsOnAnyNumberOfThreads) {
  const Shape shape{.batch = 3, .heads = 4, .length = 130, .keys = 130, .head_dim = 64};
  expect_repeatable(blocked({}), shape.inputs(), at::randn({3, 4, 130, 64}), "attention");
}

TEST(Attention, WorksInFloat64AndOnCuda) {
  const AttentionOptions scaled{.scale = 0.2};
  for (const auto& shape : {Shape{.heads = 4}, Shape{.length = 3, .keys = 9},
                            Shape{.length = 1, .keys = 9}, Shape{.length = 33, .keys = 33}})
    for (const auto& options : {AttentionOptions{}, AttentionOptions{.causal = false}, scaled}) {
      Tensors wide, cuda;
      for (const auto& input : shape.inputs()) {
        wide.push_back(input.to(at::kDouble));
        if (at::hasCUDA()) cuda.push_back(input.cuda());
      }
      expect_matches(blocked(options), plain(options), wide, 1e-12, shape.name() + " float64");
      if (at::hasCUDA())
        expect_matches(blocked(options), plain(options), cuda, 1e-4, shape.name() + " cuda");
    }
}

TEST(Attention, RefusesWhatItCannotDo) {
  const auto message = [](const Tensors& in, bool causal = true) {
    return usage_error([&] { attention(in[0], in[1], in[2], {.causal = causal}); });
  };
  EXPECT_THAT(double_backward_error(blocked({}), Shape{}.inputs()),
              HasSubstr("nn::attention has no second derivative"));
  EXPECT_THAT(message(Shape{.heads = 3}.inputs()), HasSubstr("3 heads of queries over 2"));
  EXPECT_THAT(message(Shape{.length = 6}.inputs()), HasSubstr("6 queries over 5 keys"));
  EXPECT_THAT(message({random({2, 2, 5}), random({2, 2, 5}), random({2, 2, 5})}),
              HasSubstr("[2, 2, 5]"));
  EXPECT_THAT(message({random({2, 2, 5, 8}), random({2, 2, 5, 8}), random({2, 2, 5, 4})}),
              HasSubstr("v [2, 2, 5, 4]"));
  EXPECT_THAT(
      message({random({2, 2, 5, 8}), random({2, 2, 5, 8}), random({2, 2, 5, 8}).to(at::kDouble)}),
      HasSubstr("v Double"));
}

}  // namespace
}  // namespace lockstep::nn
