#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/base/philox.h>
#include <lockstep/nn/context_parallel/sequence_split.h>
#include <lockstep/nn/layers/dropout.h>
#include <lockstep/nn/layers/random.h>

#include "../base/errors.h"
#include "../device/threads.h"

namespace lockstep::nn {
namespace {

std::shared_ptr<RandomState> state_at(std::uint64_t step, std::vector<std::int64_t> rows) {
  return std::make_shared<RandomState>(
      RandomState{.seed = 11, .step = step, .rows = std::move(rows)});
}

at::Tensor dropped(const at::Tensor& x, std::vector<std::int64_t> rows, std::uint64_t step = 5,
                   const char* site = "h.0.drop", double p = 0.3) {
  return Dropout(p, site, state_at(step, std::move(rows)))->forward(x);
}

TEST(Dropout, DropsByPhiloxOfPlace) {
  const std::vector<std::int64_t> rows = {3, 1'000'000'000'000};
  const auto found = dropped(at::ones({2, 5, 27}), rows).view({2, -1});
  const auto key = stream_key(11, "h.0.drop", 5);
  for (std::int64_t i = 0; i < 2; ++i)
    for (std::int64_t j = 0; j < 135; ++j) {
      const auto word =
          Philox::words(key, static_cast<std::uint64_t>(j / 4),
                        static_cast<std::uint64_t>(
                            rows[static_cast<std::size_t>(i)]))[static_cast<std::size_t>(j % 4)];
      const float expected = word * 0x1p-32 < 0.3 ? 0.0f : static_cast<float>(1 / 0.7);
      EXPECT_EQ(found[i][j].item<float>(), expected) << i << ' ' << j;
    }
}

TEST(Dropout, OfHalvesIsHalfOfTheWhole) {
  const auto x = at::randn({4, 7, 33});
  const auto whole = dropped(x, {8, 9, 10, 11});
  EXPECT_TRUE(dropped(x.slice(0, 0, 2), {8, 9}).equal(whole.slice(0, 0, 2)));
  EXPECT_TRUE(dropped(x.slice(0, 2), {10, 11}).equal(whole.slice(0, 2)));
  // Ranks take every second sample.
  EXPECT_TRUE(dropped(x.slice(0, 1, 4, 2), {9, 11}).equal(whole.slice(0, 1, 4, 2)));
}

// Each rank holds some of the positions; the widths make rows begin within a block of random
// numbers.
TEST(Dropout, OfSomePositionsIsThatPartOfTheWhole) {
  const std::vector<std::int64_t> rows = {3, 1ll << 40, 4};
  for (const std::int64_t width : {1, 7, 33, 64, 129}) {
    const auto whole = dropout_mask({3, 24, width}, rows, 77, 0.3, at::kCPU);
    for (const auto kind : {SplitKind::contiguous, SplitKind::zigzag})
      for (int rank = 0; rank < 3; ++rank) {
        const SequencePart part{.rank = rank, .size = 3, .kind = kind};
        const auto held = positions(24, part);
        const auto wanted = take_part(whole, 1, part);
        EXPECT_TRUE(dropout_mask({3, 8, width}, rows, 77, 0.3, at::kCPU, held).equal(wanted))
            << name(kind) << ' ' << rank << ' ' << width;
        EXPECT_TRUE(
            internal::dropout_mask_of_operators({3, 8, width}, rows, 77, 0.3, at::kCPU, held)
                .equal(wanted))
            << name(kind) << ' ' << rank << ' ' << width;
      }
  }
}

TEST(Dropout, KnowsThePositionsOfItsState) {
  const SequencePart part{.rank = 0, .size = 2, .kind = SplitKind::zigzag};
  const auto x = at::randn({2, 8, 5});
  const auto whole = dropped(x, {4, 6});
  const auto state = state_at(5, {4, 6});
  state->positions = positions(8, part);
  Dropout drop(0.3, "h.0.drop", state);
  auto mine = take_part(x, 1, part).requires_grad_();
  const auto y = drop->forward(mine);
  EXPECT_TRUE(y.equal(take_part(whole, 1, part)));
  y.backward(at::ones_like(y));
  EXPECT_TRUE((mine.grad() * mine).equal(y));
  const auto message = usage_error([&] { drop->forward(x); });
  EXPECT_NE(message.find("8 positions"), std::string::npos) << message;
  EXPECT_NE(message.find("of 4"), std::string::npos) << message;
}

TEST(Dropout, IsTheSameWithAnyNumberOfThreads) {
  // Sample sizes larger than a thread's piece, smaller than one, and empty.
  for (const std::int64_t count : {70'001, 1'003, 0}) {
    std::vector<std::int64_t> rows(301);
    std::iota(rows.begin(), rows.end(), 5);
    const auto mask = [&](int threads) {
      const Threads guard(threads);
      return dropout_mask({301, count}, rows, 77, 0.3, at::kCPU);
    };
    const auto one = mask(1);
    for (const int threads : {2, 3, 8}) EXPECT_TRUE(mask(threads).equal(one)) << threads;
  }
}

TEST(Dropout, DropsOthersInAnotherPlaceOrStep) {
  const auto x = at::ones({1, 200});
  const auto first = dropped(x, {0});
  EXPECT_TRUE(dropped(x, {0}).equal(first));
  EXPECT_FALSE(dropped(x, {1}).equal(first));
  EXPECT_FALSE(dropped(x, {0}, 6).equal(first));
  EXPECT_FALSE(dropped(x, {0}, 5, "h.1.drop").equal(first));
}

TEST(Dropout, KeepsTheMean) {
  const auto y = dropped(at::ones({4, 50'000}), {0, 1, 2, 3});
  EXPECT_NEAR(y.eq(0).to(at::kDouble).mean().item<double>(), 0.3, 0.005);
  EXPECT_NEAR(y.to(at::kDouble).mean().item<double>(), 1.0, 0.01);
}

// Compares the computation for GPUs, run on the CPU here, with the loop's bits.
TEST(Dropout, OfOperatorsIsTheSame) {
  const std::vector<std::int64_t> rows = {0, 5, 1ll << 40};
  for (const std::int64_t count : {1, 4, 63, 64, 65, 1001})
    EXPECT_TRUE(internal::dropout_mask_of_operators({3, count}, rows, ~0ull, 0.1, at::kCPU)
                    .equal(dropout_mask({3, count}, rows, ~0ull, 0.1, at::kCPU)))
        << count;
}

TEST(Dropout, OnAGpuIsTheSame) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU here";
  const auto x = at::randn({3, 1001});
  EXPECT_TRUE(
      dropped(x.to(at::kCUDA), {0, 5, 1ll << 40}).cpu().equal(dropped(x, {0, 5, 1ll << 40})));
}

TEST(Dropout, GradientIsDroppedAlike) {
  auto x = at::randn({2, 40}, at::kDouble).requires_grad_();
  const auto y = dropped(x, {4, 6});
  y.backward(at::full_like(y, 2.0));
  const auto mask = dropout_mask({2, 40}, {4, 6}, stream_key(11, "h.0.drop", 5), 0.3, at::kCPU);
  EXPECT_TRUE(x.grad().equal(2.0 * mask.to(at::kDouble)));
}

TEST(Dropout, DoesNothingInEvaluationOrAtZero) {
  const auto x = at::randn({2, 40});
  Dropout evaluated(0.5, "a", state_at(0, {}));
  evaluated->eval();
  EXPECT_TRUE(evaluated->forward(x).is_same(x));
  EXPECT_TRUE(Dropout(0.0, "a", state_at(0, {}))->forward(x).is_same(x));
}

TEST(Dropout, RefusesWhatMakesNoSense) {
  const auto message = usage_error([] { dropped(at::ones({3, 4}), {0, 1}); });
  EXPECT_NE(message.find("3 samples"), std::string::npos) << message;
  EXPECT_NE(message.find("h.0.drop"), std::string::npos) << message;
  for (const double p : {-0.1, 1.0, std::numeric_limits<double>::quiet_NaN()})
    usage_error([&] { Dropout(p, "a", state_at(0, {})); });
}

}  // namespace
}  // namespace lockstep::nn
