// A rank runs out of memory in the middle of a call: it throws, the others get its notice, and
// nothing refers to memory that is gone (which the address sanitizer would find).
#include <algorithm>
#include <new>
#include <semaphore>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/base/log.h>

#include "../../base/variables.h"
#include "ranks.h"
#include "scarcity.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kLong(10'000);
constexpr int kRanks = 4;

// Runs an all-reduce in which rank 0 may make this many allocations. True if it failed.
bool all_reduce_with(int allowed, Algorithm algorithm, const RankSettings& settings) {
  bool failed = false;
  const auto errors = try_ranks(kRanks, settings, [&](Transport& transport) {
    begin_call(transport, {.sequence = 1, .count = 1u << 18, .operation = Operation::all_reduce},
               kLong);
    std::vector<float> data(1u << 18, 1.0f);
    try {
      std::optional<Scarcity> scarcity;
      if (transport.rank() == 0) scarcity.emplace(allowed);
      all_reduce(transport, algorithm, {DType::float32, ReduceOp::sum},
                 std::as_writable_bytes(std::span(data)));
    } catch (const std::bad_alloc&) {
      transport.abandon();
      data = {};
      transport.tell({.found_by = 0, .ranks = {0}, .explanation = "out of memory"});
      failed = true;
      return;
    }
    EXPECT_EQ(data.front(), float{kRanks});
    EXPECT_EQ(data.back(), float{kRanks});
  });
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank]) continue;
    try {
      std::rethrow_exception(errors[rank]);
    } catch (const CommError& error) {
      EXPECT_TRUE(failed) << "rank " << rank << ": " << error.what();
      EXPECT_EQ(error.ranks(), std::vector<int>{0}) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << "rank " << rank << ": " << error.what();
    }
  }
  return failed;
}

class ScarcityIn : public ::testing::TestWithParam<Algorithm> {};

TEST_P(ScarcityIn, AnyAllocation) {
  const bool two_hosts = GetParam() == Algorithm::hierarchical;
  const RankSettings settings{
      .media = two_hosts ? Media::automatic : Media::tcp,
      .hosts = two_hosts ? std::vector<int>{0, 0, 1, 1} : std::vector<int>{},
      .timeout = kLong};
  int failures = 0;
  for (int allowed = 0; allowed < 200; allowed += 1 + allowed / 8)
    failures += all_reduce_with(allowed, GetParam(), settings) ? 1 : 0;
  EXPECT_GT(failures, 1);
}

INSTANTIATE_TEST_SUITE_P(Algorithms, ScarcityIn,
                         ::testing::Values(Algorithm::direct, Algorithm::ring, Algorithm::tree,
                                           Algorithm::halving_doubling, Algorithm::hierarchical),
                         [](const auto& info) { return std::string(name(info.param)); });

constexpr std::size_t kMoreThanTheKernelTakes = 64u << 20;

// A message that is half written when the call fails is finished unchanged, whatever becomes of its
// memory.
TEST(Scarcity, WhileAMessageIsHalfOut) {
  std::binary_semaphore posted(0);
  ::testing::internal::CaptureStderr();
  const auto errors = try_ranks(2, {.media = Media::tcp}, [&](Transport& transport) {
    begin_call(transport, {.sequence = 1, .operation = Operation::broadcast}, kLong);
    std::vector<std::byte> data(kMoreThanTheKernelTakes);
    if (transport.rank() == 1) {
      EXPECT_TRUE(posted.try_acquire_for(kLong));
      transport.post_receive(0, data);
      return transport.end();
    }
    transport.post_send(1, data);
    transport.abandon();
    std::fill(data.begin(), data.end(), std::byte{0xff});
    posted.release();
    transport.tell({.found_by = 0, .ranks = {0}, .explanation = "out of memory"});
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("damaged")));
  expect_ended_by_rank_0(errors);
}

// There is no memory even to keep a half-written message: the connection ends, and the peer gets
// the notice from the endpoint. Runs at a log level at which every step is logged.
TEST(Scarcity, WhileACallIsAbandoned) {
  {
    Variables variables;
    variables.set("LOCKSTEP_LOG", "debug");
    log::set_name("scarcity");
  }
  std::binary_semaphore posted(0);
  const auto errors = try_ranks(2, {.media = Media::tcp}, [&](Transport& transport) {
    begin_call(transport, {.sequence = 1, .operation = Operation::broadcast}, kLong);
    std::vector<std::byte> data(kMoreThanTheKernelTakes);
    if (transport.rank() == 1) {
      EXPECT_TRUE(posted.try_acquire_for(kLong));
      transport.post_receive(0, data);
      return transport.end();
    }
    transport.post_send(1, data);
    {
      const Scarcity nothing_left(0);
      transport.abandon();
    }
    posted.release();
    transport.tell({.found_by = 0, .ranks = {0}, .explanation = "out of memory"});
  });
  log::set_name("");
  expect_ended_by_rank_0(errors);
}

}  // namespace
}  // namespace lockstep::comm::testing
