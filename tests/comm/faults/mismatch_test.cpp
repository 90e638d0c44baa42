// Ranks whose calls do not match all get an error within a second of the second call, which names
// both calls.
#include <thread>

#include <gtest/gtest.h>

#include "collective.h"

namespace lockstep::comm::faults {
namespace {

constexpr Fingerprint kUsual{
    .count = 1000, .operation = Operation::all_reduce, .dtype = DType::float32};

Fingerprint with(Fingerprint call, const std::function<void(Fingerprint&)>& change) {
  change(call);
  return call;
}

struct Mismatch {
  std::string name;
  std::vector<Fingerprint> usual;    // made by most ranks
  std::vector<Fingerprint> deviant;  // made by one rank
  // The error must contain a part of each of the two calls' descriptions. If a rank can finish its
  // part of a call before the others look at it, later calls may be the ones that meet.
  std::string one = " called ";
  std::string other = ", but rank ";
};

std::vector<Mismatch> mismatches() {
  std::vector<Mismatch> all;
  const Fingerprint barrier{.operation = Operation::barrier};
  // Every operation against every other.
  const Operation operations[] = {Operation::all_reduce, Operation::reduce_scatter,
                                  Operation::all_gather, Operation::all_to_all,
                                  Operation::broadcast,  Operation::barrier};
  for (const Operation one : operations) {
    for (const Operation other : operations) {
      if (one == other) continue;
      Fingerprint mine = kUsual;
      mine.operation = one;
      if (one == Operation::broadcast) mine.root = 1;
      if (one == Operation::barrier) mine = barrier;
      Fingerprint theirs = kUsual;
      theirs.operation = other;
      if (other == Operation::broadcast) theirs.root = 1;
      if (other == Operation::barrier) theirs = barrier;
      all.push_back({fmt::format("{} against {}", name(one), name(other)),
                     {mine, barrier},
                     {theirs, barrier}});
      if (one != Operation::broadcast && other != Operation::broadcast) {
        all.back().one = name(one);
        all.back().other = name(other);
      }
    }
  }
  // Every algorithm must notice a difference in detail.
  for (const Operation operation : {Operation::all_reduce, Operation::reduce_scatter,
                                    Operation::all_gather, Operation::broadcast}) {
    for (const Algorithm algorithm : algorithms_of(operation)) {
      Fingerprint usual = kUsual;
      usual.operation = operation;
      usual.algorithm = algorithm;
      if (operation == Operation::broadcast) usual.root = 0;
      const auto add = [&](const std::string& what, const std::function<void(Fingerprint&)>& change,
                           const std::string& one, const std::string& other) {
        all.push_back({fmt::format("{} {}: {}", name(operation), name(algorithm), what),
                       {usual, barrier},
                       {with(usual, change), barrier}});
        if (operation == Operation::broadcast) return;
        all.back().one = one;
        all.back().other = other;
      };
      add(
          "dtype", [](Fingerprint& f) { f.dtype = DType::int32; }, "float32", "int32");
      add(
          "size", [](Fingerprint& f) { f.count = 1001; }, "1000", "1001");
      add(
          "much larger size", [](Fingerprint& f) { f.count = 200'000; }, "1000", "200000");
      add(
          "number of tensors", [](Fingerprint& f) { f.tensors = 3; }, "1000 float32",
          "in 3 tensors");
      add(
          "lengths of tensors", [](Fingerprint& f) { f.sizes = 0xabcd; }, "1000 float32",
          "of lengths [abcd]");
      if (operation == Operation::all_reduce || operation == Operation::reduce_scatter)
        add(
            "reduction", [](Fingerprint& f) { f.reduce_op = ReduceOp::max; }, "sum", "max");
      if (operation == Operation::broadcast)
        add(
            "root", [](Fingerprint& f) { f.root = 2; }, "root 0", "root 2");
      for (const Algorithm other : algorithms_of(operation))
        if (other != algorithm)
          add(
              std::string("algorithm ") + name(other),
              [other](Fingerprint& f) { f.algorithm = other; }, name(operation), ", but rank ");
      const Fingerprint gather = {.count = 77, .operation = Operation::all_gather};
      all.push_back({fmt::format("{} {}: order", name(operation), name(algorithm)),
                     {usual, gather, barrier},
                     {gather, usual, barrier}});
      all.push_back({fmt::format("{} {}: skipped", name(operation), name(algorithm)),
                     {usual, gather, barrier},
                     {gather, barrier}});
    }
  }
  return all;
}

constexpr milliseconds kMismatchDeadline(40'000);

class Mismatched : public ::testing::TestWithParam<Media> {
 protected:
  // Runs the calls; the deviant call comes last. Every rank must fail as expected.
  void check(int n, int deviant, const std::string& one, const std::string& other,
             const std::function<void(Rank&)>& usual, const std::function<void(Rank&)>& different) {
    Job job(n, {.media = GetParam()}, [&](Rank& rank) {
      rank.say("ready");
      if (rank.rank() == deviant) rank.hear("go");
      (rank.rank() == deviant ? different : usual)(rank);
    });
    for (int rank = 0; rank < n; ++rank) ASSERT_TRUE(job.says(rank, "ready"));
    std::this_thread::sleep_for(milliseconds(2));
    const auto begin = Clock::now();
    job.tell(deviant, "go");
    for (int rank = 0; rank < n; ++rank) {
      const Outcome outcome = job.outcome(rank, kMismatchDeadline);
      ASSERT_TRUE(outcome.failed) << "rank " << rank << ": " << outcome.text << outcome.said;
      EXPECT_EQ(outcome.fault, Fault::mismatch) << "rank " << rank << ": " << outcome.text;
      EXPECT_NE(outcome.text.find(one), std::string::npos) << outcome.text;
      EXPECT_NE(outcome.text.find(other), std::string::npos) << outcome.text;
      EXPECT_EQ(outcome.ranks.size(), 2u) << outcome.text;
      EXPECT_LT(outcome.at - begin, kMismatchDeadline / 2)
          << "it must not take the deadline to find it";
    }
  }
};

TEST_P(Mismatched, EveryKind) {
  int number = 0;
  for (const Mismatch& mismatch : mismatches()) {
    const int n = number % 4 == 3 ? 4 : 3;
    const int deviant = number++ % n;
    SCOPED_TRACE(fmt::format("{}, rank {} of {}", mismatch.name, deviant, n));
    const auto calls = [](const std::vector<Fingerprint>& list) {
      return [&list](Rank& rank) {
        for (const Fingerprint& call : list) run(rank, call, kMismatchDeadline);
      };
    };
    check(n, deviant, mismatch.one, mismatch.other, calls(mismatch.usual), calls(mismatch.deviant));
    if (HasFatalFailure()) return;
  }
}

// Uneven parts are compared message by message.
TEST_P(Mismatched, UnevenAllToAll) {
  const auto body = [](std::size_t from_zero) {
    return [from_zero](Rank& rank) {
      std::vector<std::byte> room(400);
      std::vector<Bytes> outputs;
      for (int peer = 0; peer < rank.size(); ++peer)
        outputs.push_back(Bytes(room).first(peer == 0 && rank.rank() != 0 ? from_zero : 100));
      std::vector<ConstBytes> inputs(static_cast<std::size_t>(rank.size()), Bytes(room).first(100));
      rank.begin({.operation = Operation::all_to_all, .tensors = 3});
      all_to_all(rank.transport(), outputs, inputs);
      rank.begin({.operation = Operation::barrier});
      barrier(rank.transport());
    };
  };
  check(3, 2, "100 bytes", "expects 104", body(100), body(104));
}

TEST_P(Mismatched, ExchangeOfOtherLengths) {
  const auto body = [](std::size_t count) {
    return [count](Rank& rank) {
      std::vector<std::byte> room(count * 4);
      const Fingerprint call{
          .sequence = 1, .count = count, .operation = Operation::exchange, .dtype = DType::float32};
      rank.begin({.operation = Operation::exchange});
      if (rank.rank() == 0) rank.transport().post_send(2, call, room);
      if (rank.rank() == 2) rank.transport().post_receive(0, call, room);
      rank.transport().end();
      rank.begin({.operation = Operation::barrier});
      barrier(rank.transport());
    };
  };
  check(3, 2, "exchange #1 (10 float32)", "exchange #1 (11 float32)", body(10), body(11));
}

INSTANTIATE_TEST_SUITE_P(Media, Mismatched, ::testing::Values(Media::shared_memory, Media::tcp),
                         [](const auto& info) { return info.param == Media::tcp ? "tcp" : "shm"; });

}  // namespace
}  // namespace lockstep::comm::faults
