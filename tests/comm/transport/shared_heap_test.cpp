// Buffers that peers read in place: the heap's guarantees, and the announcements of its segments.
#include <lockstep/comm/transport/shared_memory.h>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <thread>

#include <lockstep/base/error.h>

#include "ranks.h"

namespace lockstep::comm {
namespace {

using Buffer = std::shared_ptr<std::byte>;
constexpr std::size_t kMiB = 1u << 20;

// A heap that records its announcements.
struct NotedHeap {
  NotedHeap() {
    heap->set_announce([this](std::uint32_t number, const std::shared_ptr<SharedMemory>& memory) {
      if (memory) {
        segments[number] = memory;
      } else {
        segments.erase(number);
      }
      ++announcements;
    });
  }

  // Bytes of memory that all segments take.
  std::size_t taken() const {
    std::size_t sum = 0;
    for (const auto& [number, memory] : segments) {
      struct stat info {};
      EXPECT_EQ(::fstat(memory->descriptor(), &info), 0);
      sum += static_cast<std::size_t>(info.st_blocks) * 512;
    }
    return sum;
  }

  std::map<std::uint32_t, std::shared_ptr<SharedMemory>> segments;
  int announcements = 0;
  std::shared_ptr<SharedHeap> heap = std::make_shared<SharedHeap>();
};

TEST(SharedHeap, ManyBuffersLieInFewSegments) {
  NotedHeap noted;
  std::vector<std::pair<Buffer, std::size_t>> buffers;
  for (std::size_t i = 0; i < 500; ++i) {
    const std::size_t bytes = i * 997 % 200'000;
    buffers.emplace_back(noted.heap->allocate(bytes), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffers.back().first.get()) % 4096, 0u);
    std::memset(buffers.back().first.get(), static_cast<int>(i % 251), bytes);
  }
  EXPECT_EQ(noted.announcements, 1);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto& [buffer, bytes] = buffers[i];
    EXPECT_TRUE(std::all_of(buffer.get(), buffer.get() + bytes,
                            [i](std::byte byte) { return byte == std::byte(i % 251); }))
        << "another buffer was written over number " << i;
    EXPECT_TRUE(noted.heap->find(buffer.get(), bytes));
  }
}

TEST(SharedHeap, FindsOnlyWhatLiesInItWhole) {
  NotedHeap noted;
  std::byte elsewhere[64] = {};
  EXPECT_FALSE(noted.heap->find(elsewhere, 64));
  const Buffer buffer = noted.heap->allocate(100);
  EXPECT_FALSE(noted.heap->find(elsewhere, 64));
  const auto& memory = *noted.segments.begin()->second;
  const auto place = noted.heap->find(buffer.get() + 40, 60);
  ASSERT_TRUE(place);
  EXPECT_EQ(memory.data() + place->offset, buffer.get() + 40);
  EXPECT_TRUE(noted.heap->find(memory.data(), memory.size()));
  EXPECT_FALSE(noted.heap->find(memory.data(), memory.size() + 1));
  EXPECT_FALSE(noted.heap->find(memory.data() + memory.size(), 1));
}

TEST(SharedHeap, GapsGrowTogetherAgain) {
  NotedHeap noted;
  std::vector<Buffer> buffers;
  for (int i = 0; i < 16; ++i) buffers.push_back(noted.heap->allocate(4 * kMiB));
  ASSERT_EQ(noted.segments.size(), 1u);
  for (const int i : {3, 1, 2, 15, 0, 8, 10, 9, 4, 14, 13, 5, 7, 6, 12, 11})
    buffers[static_cast<std::size_t>(i)].reset();
  const Buffer whole = noted.heap->allocate(SharedHeap::kSegmentBytes);
  EXPECT_EQ(noted.announcements, 1) << "the segment was not whole again";
}

TEST(SharedHeap, WhatIsGivenBackTakesNoMemoryAndReadsAsZeros) {
  NotedHeap noted;
  const Buffer stays = noted.heap->allocate(1);
  Buffer buffer = noted.heap->allocate(8 * kMiB);
  std::memset(buffer.get(), 7, 8 * kMiB);
  const std::byte* where = buffer.get();
  EXPECT_GE(noted.taken(), 8 * kMiB);
  buffer.reset();
  EXPECT_LT(noted.taken(), kMiB);
  buffer = noted.heap->allocate(8 * kMiB);
  ASSERT_EQ(buffer.get(), where);
  EXPECT_TRUE(std::all_of(buffer.get(), buffer.get() + 8 * kMiB,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(SharedHeap, LargeBuffersHaveASegmentThatGoesWithThem) {
  NotedHeap noted;
  Buffer large = noted.heap->allocate(SharedHeap::kSegmentBytes + 1);
  EXPECT_EQ(noted.segments.size(), 1u);
  large.reset();
  EXPECT_TRUE(noted.segments.empty());
}

TEST(SharedHeap, OneEmptySegmentStays) {
  NotedHeap noted;
  for (int i = 0; i < 100; ++i) noted.heap->allocate(kMiB);
  EXPECT_EQ(noted.announcements, 1);
  Buffer first = noted.heap->allocate(SharedHeap::kSegmentBytes);
  Buffer second = noted.heap->allocate(SharedHeap::kSegmentBytes);
  first.reset();
  second.reset();
  EXPECT_EQ(noted.segments.size(), 1u);
}

TEST(SharedHeap, RefusesWhatNoMachineHas) {
  NotedHeap noted;
  EXPECT_THROW(noted.heap->allocate(SIZE_MAX), UsageError);
  EXPECT_THROW(noted.heap->allocate(SIZE_MAX / 2), UsageError);
}

// A rank whose call has failed may reuse its memory; a peer that was slow in the same call, and
// finds the message only now, must not take the new content for the message.
TEST(SharedHeap, AMessageIsGoneWhenItsSenderHasFailed) {
  std::atomic<bool> receiver_began{false};
  std::atomic<bool> sender_failed{false};
  const auto errors = testing::try_ranks(2, {}, [&](Transport& transport) {
    const Buffer buffer = transport.heap().allocate(8192);
    const Bytes data(buffer.get(), 8192);
    testing::begin_call(transport, {.sequence = 1}, milliseconds(20000));
    if (transport.rank() == 0) {
      while (!receiver_began) std::this_thread::yield();
      transport.post_send(1, data);
      transport.tell({.fault = Fault::aborted, .ranks = {0}, .explanation = "no more"});
      std::fill(data.begin(), data.end(), std::byte{7});
      sender_failed = true;
    } else {
      receiver_began = true;
      while (!sender_failed) std::this_thread::yield();
      transport.post_receive(0, data);
      transport.end();
    }
  });
  testing::expect_ended_by_rank_0(errors);
}

// A peer that computes does not read its socket, which holds some three hundred announcements.
#ifdef LOCKSTEP_SANITIZED
constexpr std::size_t kManySegments = 40;  // the thread sanitizer leaves few addresses on aarch64
#else
constexpr std::size_t kManySegments = 350;
#endif

TEST(SharedHeap, ManySegmentsDoNotWaitForAPeerThatComputes) {
  std::atomic<bool> allocated{false};
  testing::run_ranks(2, {}, [&](Transport& transport) {
    std::vector<Buffer> buffers;
    if (transport.rank() == 0) {
      for (std::size_t i = 0; i < kManySegments; ++i)
        buffers.push_back(transport.heap().allocate(SharedHeap::kSegmentBytes + 1));
      allocated = true;
    } else {
      buffers.assign(kManySegments, transport.heap().allocate(8192));
      while (!allocated) std::this_thread::yield();
    }
    std::uint64_t sequence = 0;
    for (const std::size_t i :
         {kManySegments - 1, std::size_t{0}, kManySegments / 2, kManySegments - 1}) {
      const Bytes data(buffers[i].get(), 8192);
      std::fill(data.begin(), data.end(), std::byte(1 + transport.rank()));
      testing::begin_call(transport, {.sequence = ++sequence}, milliseconds(20000));
      all_reduce(transport, Algorithm::direct, {DType::uint8, ReduceOp::sum}, data);
      EXPECT_TRUE(std::all_of(data.begin(), data.end(),
                              [](std::byte byte) { return byte == std::byte{3}; }));
    }
  });
}

}  // namespace
}  // namespace lockstep::comm
