// Ranks as threads, each with an endpoint and a watch of its own. Ranks that wait in a circle are
// told so, and no others.
#include <lockstep/comm/transport/wait_watch.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr WaitWatch::Times kQuick{
    .grace = milliseconds(5), .interval = milliseconds(2), .second_look = milliseconds(5)};

// A job whose groups have calls without contents: a call is over when all ranks have made it, or
// when the watch has ended its group.
class WatchedJob {
 public:
  using Groups = std::map<std::string, std::vector<int>>;

  WatchedJob(int n, Groups groups)
      : groups_(std::move(groups)), endpoints_(make_endpoints(n, secret_)) {
    std::vector<EndpointAddress> addresses;
    for (const auto& endpoint : endpoints_) addresses.push_back(endpoint->address());
    for (int rank = 0; rank < n; ++rank)
      watches_.push_back(std::make_unique<WaitWatch>(endpoints_[static_cast<std::size_t>(rank)],
                                                     rank, addresses, kQuick));
    for (const auto& [id, ranks] : groups_)
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        Member& member = members_[{id, ranks[i]}];
        member.recorder =
            std::make_shared<flight::Recorder>(id, static_cast<int>(i), ranks, nullptr);
        member.watched = watches_[static_cast<std::size_t>(ranks[i])]->watch(
            id, member.recorder, [&member, this](CommError::Details error) {
              ++num_ended;
              const std::lock_guard lock(mutex_);
              if (!member.error) member.error = std::move(error);
            });
      }
  }
  ~WatchedJob() {
    for (auto& [key, member] : members_) member.watched.reset();
  }

  std::uint64_t call(const std::string& id, int rank) {
    flight::Recorder& recorder = *members_.at({id, rank}).recorder;
    return recorder.record({.sequence = recorder.last_sequence() + 1,
                            .operation = "all_reduce",
                            .needs = flight::Record::kEveryone});
  }
  // The error with which the watch ended the call, if it did.
  std::optional<CommError::Details> wait(const std::string& id, int rank, std::uint64_t entry) {
    Member& mine = members_.at({id, rank});
    const std::uint64_t sequence = mine.recorder->entry(entry)->sequence;
    const flight::Recorder::Block block(*mine.recorder, entry);
    for (const int other : groups_.at(id))
      while (members_.at({id, other}).recorder->last_sequence() < sequence) {
        const std::lock_guard lock(mutex_);
        if (mine.error) return mine.error;
        if (over) return std::nullopt;
        std::this_thread::yield();
      }
    mine.recorder->mark(entry, flight::State::finished);
    return std::nullopt;
  }
  void refuse(const std::string& id, int rank, const std::string& reason) {
    members_.at({id, rank}).recorder->note_refusal(reason);
  }
  bool has(const std::string& id, int rank) const { return members_.contains({id, rank}); }

  std::atomic<int> num_ended = 0;
  std::atomic<bool> over = false;  // no rank waits any more

 private:
  struct Member {
    std::shared_ptr<flight::Recorder> recorder;
    std::optional<CommError::Details> error;
    std::unique_ptr<WaitWatch::Watched> watched;
  };

  const Groups groups_;
  const net::Secret secret_ = net::Secret::random();
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::vector<std::unique_ptr<WaitWatch>> watches_;
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, Member> members_;
};

TEST(WaitWatch, EndsTheCallsOfACircleOnAllRanks) {
  WatchedJob job(3, {{"x", {1, 0}}, {"y", {1, 2}}, {"z", {2, 0}}});
  const std::vector<std::string> waits_in = {"x", "y", "z"};  // indexed by rank
  std::vector<std::optional<CommError::Details>> errors(3);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.emplace_back([&, rank] {
        // This thread waits in all groups.
        for (const std::string& id : waits_in)
          if (job.has(id, rank)) job.wait(id, rank, job.call(id, rank));
        const std::string& id = waits_in[static_cast<std::size_t>(rank)];
        errors[static_cast<std::size_t>(rank)] = job.wait(id, rank, job.call(id, rank));
      });
  }
  for (int rank = 0; rank < 3; ++rank) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(error) << rank;
    EXPECT_EQ(error->fault, Fault::mismatch);
    EXPECT_EQ(error->operation, "all_reduce");
    EXPECT_EQ(error->sequence, 2u);
    EXPECT_THAT(error->ranks, ElementsAre(0, 1));
    EXPECT_THAT(error->explanation,
                AllOf(HasSubstr("rank 0 waits in all_reduce #2 of group 'x' for rank 1; rank 1 "
                                "waits in all_reduce #2 of group 'y' for rank 2; rank 2 waits in "
                                "all_reduce #2 of group 'z' for rank 0."),
                      HasSubstr("Usual causes: ")));
  }
}

TEST(WaitWatch, EndsCallsThatARankRefusesToComeTo) {
  WatchedJob job(3, {{"x", {2, 1, 0}}});
  std::vector<std::optional<CommError::Details>> errors(3);
  {
    std::vector<std::jthread> ranks;
    for (const int rank : {0, 2})
      ranks.emplace_back([&, rank] {
        errors[static_cast<std::size_t>(rank)] = job.wait("x", rank, job.call("x", rank));
      });
    job.refuse("x", 1, "'w' was registered later");
  }
  for (const int rank : {0, 2}) {
    const auto& error = errors[static_cast<std::size_t>(rank)];
    ASSERT_TRUE(error) << rank;
    EXPECT_EQ(error->fault, Fault::mismatch);
    EXPECT_EQ(error->operation, "all_reduce");
    EXPECT_EQ(error->sequence, 1u);
    EXPECT_THAT(error->ranks, ElementsAre(1));
    EXPECT_THAT(error->explanation, HasSubstr("'w' was registered later"));
  }
}

// Many groups have calls in flight at once, which are waited for in any order by ranks that pause
// for longer than a watch takes to ask twice. The watches ask all the time.
TEST(WaitWatch, LeavesAJobAtWorkAlone) {
  constexpr int kRanks = 4;
  const WatchedJob::Groups groups = {{"world", {0, 1, 2, 3}}, {"dp", {3, 2, 1, 0}},
                                     {"left", {0, 1}},        {"right", {2, 3}},
                                     {"even", {0, 2}},        {"odd", {1, 3}}};
  WatchedJob job(kRanks, groups);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < kRanks; ++rank)
    ranks.emplace_back([&, rank] {
      std::minstd_rand random(static_cast<unsigned>(rank + 1));
      std::minstd_rand order(7);  // the same order on all ranks
      std::vector<std::string> ids;
      for (const auto& group : groups) ids.push_back(group.first);
      for (int step = 0; step < 12; ++step) {
        std::shuffle(ids.begin(), ids.end(), order);
        std::vector<std::pair<std::string, std::uint64_t>> in_flight;
        for (const std::string& id : ids) {
          if (!job.has(id, rank)) continue;
          if (random() % 6 == 0) std::this_thread::sleep_for(milliseconds(random() % 60));
          in_flight.emplace_back(id, job.call(id, rank));
        }
        std::shuffle(in_flight.begin(), in_flight.end(), random);
        for (const auto& [id, entry] : in_flight)
          if (const auto error = job.wait(id, rank, entry)) {
            ADD_FAILURE() << error->explanation;
            job.over = true;  // otherwise the others would wait for this rank
            return;
          }
      }
    });
  ranks.clear();
  EXPECT_EQ(job.num_ended, 0);
}

}  // namespace
}  // namespace lockstep::comm::testing
