#include <lockstep/deferred/random_draws.h>

#include <gtest/gtest.h>

namespace lockstep::deferred {
namespace {

bool same(const TwisterState& a, const TwisterState& b) {
  return a.left_ == b.left_ && a.next_ == b.next_ && a.seed_ == b.seed_ && a.state_ == b.state_;
}

// LibTorch's state after so many draws.
TwisterState state_after(std::uint64_t draws) {
  at::mt19937 engine(5);
  for (std::uint64_t i = 0; i < draws; ++i) engine();
  return engine.data();
}

TEST(MersenneTwister, SkipsAsIfItHadDrawn) {
  for (const std::uint64_t start : {0, 1, 5, 623, 624, 625, 1000})
    for (const std::uint64_t draws : {0, 1, 2, 618, 619, 623, 624, 625, 1247, 1248, 1249, 100000}) {
      TwisterState state = state_after(start);
      skip(state, draws);
      EXPECT_TRUE(same(state, state_after(start + draws))) << start << " and " << draws;
    }
}

TEST(MersenneTwister, TellsHowManyDrawsLieBetween) {
  for (const std::uint64_t start : {0, 1, 5, 623, 624, 625})
    for (const std::uint64_t draws : {0, 1, 2, 623, 624, 625, 1248, 5000})
      EXPECT_EQ(draws_between(state_after(start), state_after(start + draws), 5000), draws);
  EXPECT_FALSE(draws_between(state_after(3), state_after(5004), 5000));
  EXPECT_FALSE(draws_between(state_after(4), state_after(3), 5000));
}

}  // namespace
}  // namespace lockstep::deferred
