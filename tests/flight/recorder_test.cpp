#include <lockstep/flight/recorder.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/base/error.h>

namespace {
// Counts this thread's allocations, so that a test can show that a path makes none.
thread_local std::size_t allocations = 0;
}  // namespace

void* operator new(std::size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
// Some of the library allocates this way and frees with the plain form.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace lockstep::flight {
namespace {

// detail[i] is a function of the sequence, so that a torn copy shows.
Record checked_record(std::uint64_t sequence) {
  Record record;
  record.sequence = sequence;
  record.operation = sequence % 2 == 0 ? "all_reduce" : "barrier";
  for (std::uint64_t i = 0; i < 4; ++i) record.detail[i] = sequence * (i + 3);
  record.file = "/some/where/train.cpp";
  record.line = static_cast<std::uint32_t>(sequence);
  return record;
}

std::string checked_summary(const Record& record) {
  bool whole = record.line == static_cast<std::uint32_t>(record.sequence);
  for (std::uint64_t i = 0; i < 4; ++i)
    whole = whole && record.detail[i] == record.sequence * (i + 3);
  return (whole ? "whole " : "torn ") + std::to_string(record.sequence);
}

TEST(Recorder, KeepsWhatItIsTold) {
  Recorder recorder("world", 1, {4, 5}, checked_summary);
  EXPECT_EQ(recorder.global_rank(), 5);
  EXPECT_TRUE(recorder.entries().empty());
  const auto before = now_ns();
  const auto first = recorder.record(checked_record(6));
  const auto second = recorder.record(checked_record(7));
  recorder.mark(first, State::started);
  recorder.mark(first, State::finished);
  recorder.mark(second, State::started);
  const auto entries = recorder.entries();
  ASSERT_EQ(entries.size(), 2u);
  EXPECT_EQ(entries[0].number, first);
  EXPECT_EQ(entries[0].sequence, 6u);
  EXPECT_EQ(entries[0].operation, "all_reduce");
  EXPECT_EQ(entries[0].summary, "whole 6");
  EXPECT_EQ(entries[0].call_site, "train.cpp:6");
  EXPECT_EQ(entries[0].state, State::finished);
  EXPECT_LE(before, entries[0].queued_ns);
  EXPECT_LE(entries[0].queued_ns, entries[0].started_ns);
  EXPECT_LE(entries[0].started_ns, entries[0].finished_ns);
  EXPECT_LE(entries[0].finished_ns, now_ns());
  EXPECT_EQ(entries[1].state, State::started);
  EXPECT_EQ(entries[1].finished_ns, 0);
  EXPECT_EQ(recorder.last_sequence(), 7u);
}

TEST(Recorder, StatesOnlyMoveForward) {
  Recorder recorder("world", 0, {0}, nullptr);
  const auto call = recorder.record({.sequence = 1, .operation = "barrier"});
  EXPECT_EQ(recorder.entries()[0].state, State::queued);
  EXPECT_EQ(recorder.entries()[0].summary, "barrier #1");
  recorder.mark(call, State::failed);
  recorder.mark(call, State::finished);
  recorder.mark(call, State::queued);
  EXPECT_EQ(recorder.entries()[0].state, State::failed);
  recorder.mark(0, State::finished);
  recorder.mark(call + 1000, State::finished);
  EXPECT_EQ(recorder.entries().size(), 1u);
}

TEST(Recorder, RingKeepsTheLast) {
  Recorder recorder("world", 0, {0}, checked_summary, 8);
  std::vector<std::uint64_t> numbers;
  for (std::uint64_t i = 1; i <= 21; ++i) numbers.push_back(recorder.record(checked_record(i)));
  recorder.mark(numbers[4], State::failed);     // overwritten long ago
  recorder.mark(numbers[20], State::finished);  // the last call
  const auto entries = recorder.entries();
  ASSERT_EQ(entries.size(), 8u);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(entries[i].sequence, 14 + i);
    EXPECT_EQ(entries[i].state, i == 7 ? State::finished : State::queued);
  }
}

TEST(Recorder, LastSequenceOutlivesTheRing) {
  Recorder recorder("world", 0, {0}, nullptr, 4);
  recorder.record({.sequence = 9, .operation = "all_reduce"});
  for (int i = 0; i < 10; ++i) recorder.record({.sequence = 0, .operation = "exchange"});
  EXPECT_EQ(recorder.last_sequence(), 9u);
}

TEST(Recorder, KeepsFourPeers) {
  Recorder recorder("world", 0, {0}, nullptr, 4);
  Record record{.sequence = 0, .operation = "exchange"};
  for (const int peer : {7, 0, 7, -1, 70'000, 65'534, 3, 5}) add_peer(record, peer);
  recorder.record(record);
  recorder.record({.sequence = 1, .operation = "barrier"});
  EXPECT_EQ(recorder.entries()[0].peers, (std::vector<int>{7, 0, 65'534, 3}));
  EXPECT_TRUE(recorder.entries()[1].peers.empty());
}

TEST(Recorder, WritingTakesNoMemory) {
  Recorder recorder("world", 0, {0}, nullptr, 16);
  const std::size_t before = allocations;
  for (std::uint64_t i = 1; i <= 100; ++i) {
    const auto call = recorder.record(checked_record(i));
    recorder.mark(call, State::started);
    recorder.mark(call, State::finished);
  }
  EXPECT_EQ(allocations, before);
}

TEST(Recorder, RankMustBeAMember) {
  EXPECT_THROW(Recorder("world", 2, {0, 1}, nullptr), UsageError);
  EXPECT_THROW(Recorder("world", -1, {0, 1}, nullptr), UsageError);
}

// Writers lap a tiny ring, markers are late on purpose, and a reader copies all the time: every
// copy is of one call, and only the call that was marked carries the mark.
TEST(Recorder, ConcurrentUseNeverMixesCalls) {
  constexpr std::uint64_t kCalls = 60000;
  constexpr int kWriters = 3;
  Recorder recorder("world", 0, {0}, checked_summary, 4);
  std::atomic<bool> go{false};
  std::atomic<int> running{kWriters};
  std::atomic<std::uint64_t> late{0};
  std::vector<std::thread> threads;
  for (int writer = 0; writer < kWriters; ++writer) {
    threads.emplace_back([&, writer] {
      while (!go) std::this_thread::yield();
      for (std::uint64_t i = 0; i < kCalls; ++i) {
        // Even sequences are never marked as failed; odd ones always are.
        const std::uint64_t sequence = i * kWriters + static_cast<std::uint64_t>(writer) + 1;
        const auto number = recorder.record(checked_record(sequence));
        if (sequence % 2 == 1) recorder.mark(number, State::failed);
        if (sequence % 2 == 0) recorder.mark(number, State::started);
        late.store(number, std::memory_order_relaxed);
      }
      --running;
    });
  }
  // Marks a number that the ring is just overwriting, or soon will: it must mark that call or none.
  threads.emplace_back([&] {
    while (running > 0) {
      const auto number = late.load(std::memory_order_relaxed);
      recorder.mark(number, State::started);
      if (number > 4) recorder.mark(number - 4, State::started);
    }
  });
  go = true;
  std::uint64_t seen = 0;
  do {
    std::uint64_t last = 0;
    for (const Entry& entry : recorder.entries()) {
      ++seen;
      EXPECT_LT(last, entry.number);
      last = entry.number;
      ASSERT_EQ(entry.summary, "whole " + std::to_string(entry.sequence));
      ASSERT_EQ(entry.call_site, "train.cpp:" + std::to_string(entry.sequence));
      if (entry.sequence % 2 == 0) {
        ASSERT_NE(entry.state, State::failed);
      }
      if (entry.started_ns != 0) {
        ASSERT_LE(entry.queued_ns, entry.started_ns);
      }
      if (entry.finished_ns != 0) {
        ASSERT_LE(entry.finished_ns, now_ns());
      }
    }
  } while (running > 0);
  for (auto& thread : threads) thread.join();
  EXPECT_GT(seen, 0u);
  EXPECT_EQ(recorder.last_sequence(), kCalls * kWriters);
}

// The ring has one slot, so every mark races with the next call taking the slot.
TEST(Recorder, LateMarksHitNothing) {
  constexpr std::uint64_t kCalls = 300000;
  Recorder recorder("world", 0, {0}, checked_summary, 1);
  std::atomic<std::uint64_t> last{0};
  std::thread writer([&] {
    for (std::uint64_t i = 1; i <= kCalls; ++i)
      last.store(recorder.record(checked_record(i)), std::memory_order_relaxed);
  });
  std::uint64_t wrong = 0;
  while (last.load(std::memory_order_relaxed) < kCalls) {
    const auto number = last.load(std::memory_order_relaxed);
    if (number % 3 == 0) recorder.mark(number, State::failed);
    for (const Entry& entry : recorder.entries())
      if (entry.number % 3 != 0 && entry.state == State::failed) ++wrong;
  }
  writer.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace lockstep::flight
