#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include <lockstep/device/parallel_pieces.h>

#include "threads.h"

namespace lockstep::device {
namespace {

TEST(ParallelPieces, CoverEveryIndexOnce) {
  for (const int threads : {1, 2, 3})
    for (const std::int64_t count : {0, 1, 5, 64, 1000})
      for (const std::int64_t grain : {1, 7, 64}) {
        const Threads guard(threads);
        std::vector<int> visits(static_cast<std::size_t>(count));
        parallel_pieces(count, grain, [&](std::int64_t begin, std::int64_t end) {
          EXPECT_EQ(begin % grain, 0);
          for (auto i = begin; i < end; ++i) ++visits[static_cast<std::size_t>(i)];
        });
        EXPECT_EQ(visits, std::vector<int>(visits.size(), 1)) << count << " by " << grain;
      }
}

TEST(ParallelPieces, RunOnAsManyThreadsAsLibTorchHas) {
  const auto threads_seen = [](int threads) {
    const Threads guard(threads);
    std::mutex mutex;
    std::set<std::thread::id> seen;
    parallel_pieces(100, 1, [&](std::int64_t, std::int64_t) {
      const std::scoped_lock lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    return seen.size();
  };
  EXPECT_EQ(threads_seen(1), 1u);
  EXPECT_EQ(threads_seen(2), 2u);
}

TEST(ParallelPieces, ThrowWhatABodyThrew) {
  const Threads guard(2);
  EXPECT_THROW(parallel_pieces(100, 1,
                               [](std::int64_t begin, std::int64_t) {
                                 if (begin > 0) throw std::runtime_error("a piece");
                               }),
               std::runtime_error);
}

}  // namespace
}  // namespace lockstep::device
