#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/base/hash.h>
#include <lockstep/base/philox.h>
#include <lockstep/nn/kernels/cpu/philox_lanes.h>
#include <lockstep/nn/layers/random.h>

#include "../base/errors.h"
#include "../device/threads.h"

namespace lockstep::nn {
namespace {

at::Tensor normals(at::IntArrayRef sizes, std::int64_t offset = 0, double std = 1.0,
                   std::string_view name = "a.weight", std::uint64_t seed = 7) {
  auto tensor = at::empty(sizes);
  fill_normal(tensor, seed, name, std, offset);
  return tensor;
}

TEST(PhiloxLanes, AreTheWordsOfEachBlock) {
  PhiloxLanes lanes;
  const std::uint64_t first = 0xfffffff8;  // the counter's low half overflows on the way
  lanes.draw(0x0123456789abcdef, first, 0xfedcba9876543210);
  for (std::uint64_t i = 0; i < PhiloxLanes::kLanes; ++i) {
    const auto words = Philox::words(0x0123456789abcdef, first + i, 0xfedcba9876543210);
    for (std::size_t word = 0; word < 4; ++word) EXPECT_EQ(lanes.words[word][i], words[word]);
  }
}

// Computes the Box-Muller method with the library's functions, one number at a time.
TEST(FillNormal, IsBoxMullerOfPhilox) {
  const double std = 0.02;
  const auto found = normals({999}, 0, std);
  const auto words = Philox::words(7, 0, hash_text("a.weight"));
  const std::uint64_t key = words[0] | static_cast<std::uint64_t>(words[1]) << 32;
  for (std::int64_t i = 0; i < 999; ++i) {
    const auto block = Philox::words(key, static_cast<std::uint64_t>(i / 4));
    const std::size_t pair = i % 4 < 2 ? 0 : 2;
    const double radius = std::sqrt(-2 * std::log((block[pair] + 0.5) * 0x1p-32));
    const double angle = 2 * std::numbers::pi * block[pair + 1] * 0x1p-32;
    const double expected = std * radius * (i % 2 == 0 ? std::cos(angle) : std::sin(angle));
    EXPECT_NEAR(found[i].item<double>(), expected, 1e-8 * std + 6.1e-8 * std::abs(expected));
  }
}

// Every machine has to get these bits: a run begun on one may continue on another.
TEST(FillNormal, GivesTheSameBitsEverywhere) {
  const auto found = normals({100'003}, 0, 0.02);
  std::uint64_t hash = 0xcbf29ce484222325ull;
  const auto bits = found.view(at::kInt);
  for (std::int64_t i = 0; i < bits.numel(); ++i)
    hash = (hash ^ static_cast<std::uint32_t>(bits.data_ptr<int>()[i])) * 0x100000001b3ull;
  EXPECT_EQ(hash, 0x62568e43116e5302ull);
}

TEST(FillNormal, IsTheSameHoweverItIsCut) {
  const auto whole = normals({1000});
  for (const std::int64_t cut : {1, 2, 3, 4, 63, 64, 65, 500, 999}) {
    EXPECT_TRUE(normals({cut}).equal(whole.slice(0, 0, cut))) << cut;
    EXPECT_TRUE(normals({1000 - cut}, cut).equal(whole.slice(0, cut))) << cut;
  }
  EXPECT_TRUE(normals({10, 100}).flatten().equal(whole));
}

TEST(FillNormal, IsTheSameWithAnyNumberOfThreads) {
  // One offset is in the middle of a block of Philox.
  for (const std::int64_t offset : {0, 3}) {
    const auto drawn = [&](int threads) {
      const Threads guard(threads);
      return normals({300'001}, offset);
    };
    const auto one = drawn(1);
    for (const int threads : {2, 3, 8}) EXPECT_TRUE(drawn(threads).equal(one)) << threads;
  }
}

TEST(FillNormal, IsNormal) {
  const auto x = normals({1'000'000}).to(at::kDouble);
  EXPECT_NEAR(x.mean().item<double>(), 0, 0.005);
  EXPECT_NEAR(x.square().mean().item<double>(), 1, 0.01);
  EXPECT_NEAR(x.pow(4).mean().item<double>(), 3, 0.05);
  EXPECT_NEAR(x.abs().gt(3).to(at::kDouble).mean().item<double>(), 0.0027, 0.0003);
  // Neighbouring numbers share a radius, but are independent.
  EXPECT_NEAR((x.slice(0, 0, -1) * x.slice(0, 1)).mean().item<double>(), 0, 0.005);
}

TEST(FillNormal, DependsOnSeedAndName) {
  const auto x = normals({64});
  EXPECT_FALSE(normals({64}, 0, 1.0, "b.weight").equal(x));
  EXPECT_FALSE(normals({64}, 0, 1.0, "a.weight", 8).equal(x));
  EXPECT_TRUE(normals({64}, 0, 0.5).equal(x * 0.5));
}

TEST(FillNormal, FillsOtherTypesAndStrides) {
  const auto whole = normals({6, 4});
  auto narrow = at::empty({6, 4}, at::kBFloat16);
  fill_normal(narrow, 7, "a.weight", 1.0);
  EXPECT_TRUE(narrow.equal(whole.to(at::kBFloat16)));
  auto strided = at::empty({4, 6}).t();
  fill_normal(strided, 7, "a.weight", 1.0);
  EXPECT_TRUE(strided.equal(whole));
  auto trained = at::empty({6, 4}).requires_grad_();
  fill_normal(trained, 7, "a.weight", 1.0);
  EXPECT_TRUE(trained.equal(whole));
  EXPECT_TRUE(trained.is_leaf());
  fill_normal(at::empty({0}), 7, "a.weight", 1.0);
}

TEST(FillNormal, RefusesWhatHoldsNoNormals) {
  const auto message =
      usage_error([] { fill_normal(at::empty({3}, at::kLong), 7, "a.weight", 1.0); });
  EXPECT_NE(message.find("a.weight"), std::string::npos) << message;
  usage_error([] { fill_normal(at::empty({3}), 7, "a.weight", 1.0, -1); });
}

TEST(StreamKey, DependsOnEverything) {
  EXPECT_EQ(stream_key(1, "a", 2), stream_key(1, "a", 2));
  EXPECT_NE(stream_key(1, "a", 2), stream_key(2, "a", 2));
  EXPECT_NE(stream_key(1, "a", 2), stream_key(1, "b", 2));
  EXPECT_NE(stream_key(1, "a", 2), stream_key(1, "a", 3));
}

}  // namespace
}  // namespace lockstep::nn
