#include <lockstep/observe/slow_ranks.h>

#include <cmath>
#include <functional>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/error.h>

namespace lockstep::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using News = SlowRanks::News;

// Numbers between -1 and 1 that are the same on every machine.
class Noise {
 public:
  double next() {
    state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state_ >> 33) / static_cast<double>(1u << 30) - 1;
  }

 private:
  std::uint64_t state_ = 42;
};

// Feeds steps whose times `seconds(step, index)` gives, and returns all news about them.
std::vector<News> feed(SlowRanks& ranks, int num_ranks, std::uint64_t first, std::uint64_t last,
                       const std::function<double(std::uint64_t, int)>& seconds) {
  std::vector<News> all;
  for (std::uint64_t step = first; step < last; ++step) {
    std::vector<double> times;
    for (int i = 0; i < num_ranks; ++i) times.push_back(seconds(step, i));
    for (const News& news : ranks.step(step, times)) all.push_back(news);
  }
  return all;
}

TEST(SlowRanks, HalfSpeedIsNamedWithinTwentySteps) {
  for (const int num_ranks : {2, 3, 4, 64}) {
    SCOPED_TRACE(num_ranks);
    std::vector<int> names;
    for (int i = 0; i < num_ranks; ++i) names.push_back(8 * i);
    Noise noise;
    const auto times = [&](std::uint64_t step, int i) {
      const double whole = step % 7 == 0 ? 0.3 : 0.2;  // steps that differ, but alike on all ranks
      return whole * (i == 1 && step >= 100 ? 2 : 1) * (1 + 0.2 * noise.next());
    };
    SlowRanks ranks(names);
    EXPECT_THAT(feed(ranks, num_ranks, 0, 100, times), IsEmpty());
    const auto news = feed(ranks, num_ranks, 100, 300, times);
    ASSERT_EQ(news.size(), 1u);
    EXPECT_EQ(news[0].kind, News::Kind::slow);
    EXPECT_EQ(news[0].rank, 8);
    EXPECT_LT(news[0].step, 120u);
    EXPECT_NEAR(news[0].ratio, 2, 0.6);
    EXPECT_THAT(ranks.slow(), ElementsAre(8));
  }
}

TEST(SlowRanks, OneThatAlwaysWasIsNamedWithinTwentySteps) {
  SlowRanks ranks({0, 1, 2, 3});
  const auto news =
      feed(ranks, 4, 0, 20, [](std::uint64_t, int i) { return i == 3 ? 0.42 : 0.21; });
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0].text(), "rank 3 is slow: its own part of a step takes 0.42 s, that of the "
                            "others 0.21 s (2.0 times)");
}

TEST(SlowRanks, NoiseNamesNobody) {
  SlowRanks ranks({0, 1, 2, 3});
  Noise noise;
  EXPECT_THAT(
      feed(ranks, 4, 0, 2000, [&](std::uint64_t, int) { return 0.1 * (1 + 0.6 * noise.next()); }),
      IsEmpty());
}

// Checkpoints, page faults, a neighbour's job: these are long, but do not repeat.
TEST(SlowRanks, PausesNameNobody) {
  SlowRanks ranks({0, 1, 2});
  EXPECT_THAT(feed(ranks, 3, 0, 500,
                   [](std::uint64_t step, int i) {
                     const bool saves = i == 0 && step % 10 == 0;
                     const bool stalls = i == 1 && step >= 100 && step < 107;
                     return saves ? 5.0 : stalls ? 1.0 : 0.1;
                   }),
              IsEmpty());
}

TEST(SlowRanks, TwoSlowRanksAreBothNamed) {
  for (const int num_ranks : {3, 4, 8}) {
    SCOPED_TRACE(num_ranks);
    std::vector<int> names;
    for (int i = 0; i < num_ranks; ++i) names.push_back(i);
    SlowRanks ranks(names);
    const auto news = feed(ranks, num_ranks, 0, 40,
                           [](std::uint64_t, int i) { return i == 0 || i == 2 ? 0.2 : 0.1; });
    ASSERT_EQ(news.size(), 2u);
    EXPECT_THAT(ranks.slow(), ElementsAre(0, 2));
  }
}

TEST(SlowRanks, RecoveryIsSaidOnceToo) {
  SlowRanks ranks({4, 5});
  const auto times = [](std::uint64_t step, int i) {
    return i == 1 && step >= 20 && step < 60 ? 0.3 : 0.1;
  };
  const auto news = feed(ranks, 2, 0, 200, times);
  ASSERT_EQ(news.size(), 2u);
  EXPECT_EQ(news[0].kind, News::Kind::slow);
  EXPECT_EQ(news[1].kind, News::Kind::well_again);
  EXPECT_EQ(news[1].rank, 5);
  EXPECT_LT(news[1].step, 80u);
  EXPECT_THAT(news[1].text(), HasSubstr("rank 5 is about as fast as the others again"));
  EXPECT_THAT(ranks.slow(), IsEmpty());
}

// Between the two bounds nothing is reported, whichever side the time comes from.
TEST(SlowRanks, DoesNotWaver) {
  SlowRanks ranks({0, 1});
  const auto news = feed(ranks, 2, 0, 400, [](std::uint64_t step, int i) {
    const bool much = step < 100 || step / 20 % 2 == 0;
    return i == 0 ? 0.1 : much ? 0.16 : 0.13;
  });
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0].kind, News::Kind::slow);
}

TEST(SlowRanks, SmallDifferencesAreNotWorthAWord) {
  SlowRanks ranks({0, 1});
  const auto times = [](std::uint64_t, int i) { return i == 0 ? 0.0005 : 0.0015; };
  EXPECT_THAT(feed(ranks, 2, 0, 1000, times), IsEmpty());
  SlowRanks strict({0, 1}, {.worth_seconds = 0});
  EXPECT_EQ(feed(strict, 2, 0, 1000, times).size(), 1u);
}

// A core that is lent to others for 60 ms delays a dozen steps of a millisecond in a row.
TEST(SlowRanks, ShortStepsDoNotFlicker) {
  SlowRanks ranks({0, 1, 2});
  const auto lent = [](std::uint64_t step, int i) {
    return i == 1 && step % 300 < 12 ? 0.005 : 0.001;
  };
  EXPECT_THAT(feed(ranks, 3, 0, 20'000, lent), IsEmpty());
  const auto news =
      feed(ranks, 3, 20'000, 21'000, [](std::uint64_t, int i) { return i == 1 ? 0.005 : 0.001; });
  ASSERT_EQ(news.size(), 1u) << "it is slow for good";
  EXPECT_NEAR(news[0].seconds, 0.005, 1e-4);
}

TEST(SlowRanks, UnknownTimesAreLeftOut) {
  SlowRanks ranks({0, 1, 2});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  const auto news = feed(ranks, 3, 0, 60, [&](std::uint64_t step, int i) {
    if (i == 2) return step % 3 == 0 ? nan : step % 3 == 1 ? inf : -1.0;
    if (i == 1 && step % 2 == 0) return 0.0;
    return i == 1 ? 0.4 : 0.1;
  });
  ASSERT_EQ(news.size(), 1u);
  EXPECT_EQ(news[0].rank, 1);
}

TEST(SlowRanks, MistakesAreNamed) {
  EXPECT_THROW(SlowRanks({0}), UsageError);
  EXPECT_THROW(SlowRanks({0, 1}, {.slow = 1.1, .well = 1.2}), UsageError);
  EXPECT_THROW(SlowRanks({0, 1}, {.well = 0.9}), UsageError);
  SlowRanks ranks({0, 1});
  EXPECT_THROW(ranks.step(0, std::vector<double>{1.0}), UsageError);
}

}  // namespace
}  // namespace lockstep::observe
