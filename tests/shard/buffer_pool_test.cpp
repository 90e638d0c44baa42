#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/parallel/shard/buffer_pool.h>

namespace lockstep::shard {
namespace {

constexpr std::int64_t kNoLimit = std::int64_t{1} << 40;

// Counts allocations, and those that are still alive.
struct Source {
  std::atomic<std::int64_t> num_allocated = 0;
  std::atomic<std::int64_t> alive_bytes = 0;

  BufferPool::Allocate allocate() {
    return [this](std::int64_t bytes) {
      ++num_allocated;
      alive_bytes += bytes;
      auto* const memory = new char[static_cast<std::size_t>(bytes)];
      return at::from_blob(
          memory, {bytes},
          [this, bytes](void* pointer) {
            alive_bytes -= bytes;
            delete[] static_cast<char*>(pointer);
          },
          at::kByte);
    };
  }
};

TEST(BufferPool, HandsOutAgainWhatCameBack) {
  Source source;
  BufferPool pool(source.allocate(), kNoLimit);
  for (int round = 0; round < 10; ++round) {
    const c10::DataPtr first = pool.take(1000);
    const c10::DataPtr second = pool.take(1000);
    ASSERT_NE(first.get(), second.get());
  }
  EXPECT_EQ(source.num_allocated, 2);
  EXPECT_EQ(pool.usage().taken_bytes, 0);
  EXPECT_EQ(pool.usage().held_bytes, source.alive_bytes);
}

TEST(BufferPool, AlmostTheSameSizeFits) {
  Source source;
  BufferPool pool(source.allocate(), kNoLimit);
  pool.take(1000);
  pool.take(990);
  EXPECT_EQ(source.num_allocated, 1);
  const c10::DataPtr larger = pool.take(1'000'000);
  std::memset(larger.get(), 1, 1'000'000);
}

TEST(BufferPool, ALargeBufferIsNotWastedOnASmallOne) {
  Source source;
  BufferPool pool(source.allocate(), kNoLimit);
  pool.take(1 << 20);
  const c10::DataPtr small = pool.take(16);
  EXPECT_EQ(source.num_allocated, 2);
}

TEST(BufferPool, Peaks) {
  Source source;
  BufferPool pool(source.allocate(), kNoLimit);
  {
    const c10::DataPtr first = pool.take(1000);
    const c10::DataPtr second = pool.take(500);
    EXPECT_EQ(pool.usage().taken_bytes, 1500);
  }
  EXPECT_EQ(pool.usage().taken_bytes, 0);
  EXPECT_EQ(pool.usage().peak_taken_bytes, 1500);
  EXPECT_EQ(pool.usage().held_bytes, 1500);
  EXPECT_EQ(pool.usage().peak_held_bytes, 1500);
  const c10::DataPtr one = pool.take(500);
  pool.reset_peaks();
  EXPECT_EQ(pool.usage().peak_taken_bytes, 500);
  EXPECT_EQ(pool.usage().peak_held_bytes, 1500);
}

TEST(BufferPool, WhatWaitsStaysBelowTheLimit) {
  Source source;
  BufferPool pool(source.allocate(), 2500);
  {
    std::vector<c10::DataPtr> taken;
    for (int number = 0; number < 5; ++number) taken.push_back(pool.take(1000));
    EXPECT_EQ(pool.usage().taken_bytes, 5000) << "the limit is not on what is in use";
  }
  EXPECT_GT(pool.usage().held_bytes, 0);
  EXPECT_LE(pool.usage().held_bytes, 2500);
  EXPECT_EQ(pool.usage().held_bytes, source.alive_bytes);
}

TEST(BufferPool, WhatIsTooSmallMakesRoom) {
  Source source;
  BufferPool pool(source.allocate(), 1500);
  pool.take(1000);
  { const c10::DataPtr larger = pool.take(1200); }
  EXPECT_LE(source.alive_bytes, 1500);
  EXPECT_EQ(pool.usage().held_bytes, source.alive_bytes);
}

TEST(BufferPool, WithoutRoomNothingWaits) {
  Source source;
  BufferPool pool(source.allocate(), 0);
  pool.take(1000);
  EXPECT_EQ(source.alive_bytes, 0);
  EXPECT_EQ(pool.usage().held_bytes, 0);
}

TEST(BufferPool, BuffersOutliveThePool) {
  Source source;
  std::optional<BufferPool> pool(std::in_place, source.allocate(), kNoLimit);
  pool->take(777);
  at::Tensor tensor = pool->take(100, at::TensorOptions(at::kFloat));
  pool.reset();
  EXPECT_EQ(source.alive_bytes, 400) << "what waited is freed with the pool";
  tensor.fill_(3);
  EXPECT_EQ(tensor.sum().item<float>(), 300);
  tensor.reset();
  EXPECT_EQ(source.alive_bytes, 0);
}

TEST(BufferPool, TensorsAreOfTheAskedTypeAndSize) {
  Source source;
  BufferPool pool(source.allocate(), kNoLimit);
  const at::Tensor doubles = pool.take(9, at::TensorOptions(at::kDouble));
  EXPECT_EQ(doubles.scalar_type(), at::kDouble);
  EXPECT_EQ(doubles.sizes(), at::IntArrayRef({9}));
  EXPECT_EQ(pool.usage().taken_bytes, 72);
  EXPECT_EQ(pool.take(0, at::TensorOptions(at::kFloat)).numel(), 0);
  // A view keeps the memory alive.
  at::Tensor view = pool.take(8, at::TensorOptions(at::kFloat)).slice(0, 2, 4);
  view.fill_(1);
  const at::Tensor other = pool.take(8, at::TensorOptions(at::kFloat)).zero_();
  EXPECT_EQ(view.sum().item<float>(), 2);
}

TEST(BufferPool, AnAllocationThatFailsLeavesItUsable) {
  Source source;
  bool fail = true;
  BufferPool pool(
      [&, allocate = source.allocate()](std::int64_t bytes) {
        if (fail) throw std::bad_alloc();
        return allocate(bytes);
      },
      kNoLimit);
  EXPECT_THROW(pool.take(100), std::bad_alloc);
  EXPECT_EQ(pool.usage().taken_bytes, 0);
  EXPECT_EQ(pool.usage().held_bytes, 0);
  fail = false;
  EXPECT_NE(pool.take(100).get(), nullptr);
}

TEST(BufferPool, ManyThreads) {
  Source source;
  constexpr int kThreads = 4;
  {
    BufferPool pool(source.allocate(), kNoLimit);
    std::atomic<int> num_wrong = 0;
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < kThreads; ++thread)
      threads.emplace_back([&, thread] {
        for (int round = 0; round < 2000; ++round) {
          const auto size = static_cast<std::size_t>(100 + (round * 37 + thread) % 3 * 1000);
          const c10::DataPtr mine = pool.take(static_cast<std::int64_t>(size));
          std::memset(mine.get(), thread + 1, size);
          const char* const bytes = static_cast<const char*>(mine.get());
          for (std::size_t at = 0; at < size; at += 50)
            if (bytes[at] != thread + 1) ++num_wrong;
        }
      });
    threads.clear();
    EXPECT_EQ(num_wrong, 0) << "two had the same memory";
    EXPECT_EQ(pool.usage().taken_bytes, 0);
    EXPECT_LE(pool.usage().peak_taken_bytes, kThreads * 2200);
    EXPECT_EQ(pool.usage().held_bytes, source.alive_bytes);
    EXPECT_LE(source.num_allocated, 3 * kThreads);
  }
  EXPECT_EQ(source.alive_bytes, 0);
}

}  // namespace
}  // namespace lockstep::shard
