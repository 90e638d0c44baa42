#include <lockstep/data/sampling/prefetcher.h>

#include <atomic>
#include <memory>
#include <semaphore>
#include <string>

#include <gtest/gtest.h>

namespace lockstep::data {
namespace {

TEST(Prefetcher, HandsOutInOrder) {
  for (const int workers : {1, 2, 4}) {
    for (const std::int64_t ahead : {1, 2, 3, 9}) {
      Prefetcher<std::string> prefetcher([](std::int64_t k) { return std::to_string(k); }, 200,
                                         workers, ahead);
      for (int k = 0; k < 200; ++k) ASSERT_EQ(prefetcher.take(), std::to_string(k));
      EXPECT_EQ(prefetcher.take(), std::nullopt);
      EXPECT_EQ(prefetcher.take(), std::nullopt);
    }
  }
}

TEST(Prefetcher, OfNothingGivesNothing) {
  Prefetcher<int> prefetcher([](std::int64_t) { return 1; }, 0, 2, 2);
  EXPECT_EQ(prefetcher.take(), std::nullopt);
}

// The second item is made first, but is still handed out second.
TEST(Prefetcher, WhatIsReadyEarlyWaitsForItsTurn) {
  std::binary_semaphore second_made(0);
  Prefetcher<std::int64_t> prefetcher(
      [&](std::int64_t k) {
        if (k == 0) second_made.acquire();
        if (k == 1) second_made.release();
        return k;
      },
      2, 2, 2);
  EXPECT_EQ(prefetcher.take(), 0);
  EXPECT_EQ(prefetcher.take(), 1);
}

TEST(Prefetcher, NeverRunsFurtherAheadThanAsked) {
  std::atomic<std::int64_t> taken = 0;
  std::atomic<std::int64_t> furthest = 0;
  std::counting_semaphore<> made(0);
  Prefetcher<std::int64_t> prefetcher(
      [&](std::int64_t k) {
        const std::int64_t distance = k - taken.load();
        for (auto seen = furthest.load(); distance > seen;)
          if (furthest.compare_exchange_weak(seen, distance)) break;
        made.release();
        return k;
      },
      100, 4, 3);
  // The queue fills up by itself, before anything is taken.
  for (int i = 0; i < 3; ++i) made.acquire();
  for (std::int64_t k = 0; k < 100; ++k) {
    // Counted before the take: the worker that gets room may be faster than this thread.
    taken = k + 1;
    ASSERT_EQ(prefetcher.take(), k);
  }
  EXPECT_LE(furthest, 2);
}

TEST(Prefetcher, WorkersWorkAtOnce) {
  // Each worker waits until all four are inside.
  std::atomic<int> here = 0;
  std::counting_semaphore<> all_here(0);
  Prefetcher<int> prefetcher(
      [&](std::int64_t) {
        if (++here == 4) all_here.release(4);
        all_here.acquire();
        return 1;
      },
      4, 4, 4);
  for (int k = 0; k < 4; ++k) EXPECT_EQ(prefetcher.take(), 1);
}

TEST(Prefetcher, AnErrorComesInItsTurnAndStays) {
  Prefetcher<std::int64_t> prefetcher(
      [](std::int64_t k) {
        if (k >= 2) throw std::runtime_error("sample " + std::to_string(k));
        return k;
      },
      10, 3, 6);
  EXPECT_EQ(prefetcher.take(), 0);
  EXPECT_EQ(prefetcher.take(), 1);
  for (int again = 0; again < 2; ++again) {
    try {
      prefetcher.take();
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "sample 2");
    }
  }
}

TEST(Prefetcher, EndsAtAnyPoint) {
  for (const int workers : {1, 4})
    for (const int takes : {0, 1, 5, 20})
      for (int repeat = 0; repeat < 20; ++repeat) {
        Prefetcher<std::unique_ptr<int>> prefetcher(
            [](std::int64_t k) { return std::make_unique<int>(static_cast<int>(k)); }, 20, workers,
            4);
        for (int k = 0; k < takes; ++k) ASSERT_EQ(**prefetcher.take(), k);
      }
}

// The destructor waits for items that are being made, because they may use things that its owner
// destroys next.
TEST(Prefetcher, WaitsForWhatIsBeingMade) {
  std::binary_semaphore begun(0);
  std::binary_semaphore may_end(0);
  std::atomic<bool> ended = false;
  auto prefetcher = std::make_unique<Prefetcher<int>>(
      [&](std::int64_t) {
        begun.release();
        may_end.acquire();
        ended = true;
        return 1;
      },
      1, 1, 1);
  begun.acquire();
  std::thread destroyer([&] {
    prefetcher.reset();
    EXPECT_TRUE(ended);
  });
  may_end.release();
  destroyer.join();
}

}  // namespace
}  // namespace lockstep::data
