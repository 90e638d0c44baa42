// Ranks that wait for each other in different groups: which are found, and which are only slow.
#include <lockstep/flight/circle.h>

#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::flight {
namespace {

using ::testing::HasSubstr;

// A job with artificial ranks: a test says which calls their threads make and wait in.
class Job {
 public:
  explicit Job(int num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) open_.push_back(std::make_unique<OpenCalls>(rank));
  }

  void add_group(const std::string& id, const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < ranks.size(); ++i) {
      auto& recorder = recorders_[{id, ranks[i]}];
      recorder = std::make_shared<Recorder>(id, static_cast<int>(i), ranks, nullptr);
      open_[static_cast<std::size_t>(ranks[i])]->add(id, recorder);
    }
  }
  void leave(const std::string& id, int rank) {
    open_[static_cast<std::size_t>(rank)]->remove(id);
    recorders_.erase({id, rank});
  }

  Recorder& of(const std::string& id, int rank) { return *recorders_.at({id, rank}); }

  // A rank makes the group's next call and returns its entry.
  std::uint64_t call(const std::string& id, int rank, std::int32_t needs = Record::kEveryone) {
    Recorder& recorder = of(id, rank);
    return recorder.record(
        {.sequence = recorder.last_sequence() + 1, .operation = "all_reduce", .needs = needs});
  }
  std::uint64_t receive(const std::string& id, int rank, int from, std::uint64_t number) {
    Record record{.operation = "exchange"};
    add_peer(record, from, number);
    return of(id, rank).record(record);
  }

  const OpenCalls& rank(int rank) const { return *open_[static_cast<std::size_t>(rank)]; }
  Ask ask() {
    return [this](int rank, const Question& question) {
      ++questions;
      // The answer after encoding and decoding, as it travels.
      return Answer::decode(open_[static_cast<std::size_t>(rank)]
                                ->answer(*Question::decode(question.encode()))
                                .encode());
    };
  }
  // The circles that the waiting ranks find, in two searches.
  std::vector<Circle> circles() {
    std::vector<Circle> found;
    for (const auto& open : open_)
      for (const auto& wait : open->waits())
        if (auto circle = find_circle(wait.call, ask()); circle && still_there(*circle, ask()))
          found.push_back(std::move(*circle));
    return found;
  }

  int questions = 0;

 private:
  std::vector<std::unique_ptr<OpenCalls>> open_;
  std::map<std::pair<std::string, int>, std::shared_ptr<Recorder>> recorders_;
};

// A thread of a rank that makes one call and stays blocked in it.
class Waiting {
 public:
  Waiting(Job& job, const std::vector<std::string>& groups, int rank,
          const std::function<std::pair<std::string, std::uint64_t>()>& call) {
    std::atomic<bool> there = false;
    thread_ = std::jthread([&, rank, call](const std::stop_token& stop) {
      // This thread uses all groups of its rank.
      for (const std::string& group : groups) {
        Recorder& recorder = job.of(group, rank);
        recorder.mark(recorder.record({.operation = "exchange"}), State::finished);
      }
      const auto [group, entry] = call();
      const Recorder::Block block(job.of(group, rank), entry);
      there = true;
      while (!stop.stop_requested()) std::this_thread::yield();
    });
    while (!there) std::this_thread::yield();
  }

 private:
  std::jthread thread_;
};

using Call = std::pair<std::string, std::uint64_t>;

TEST(Circle, OfTwoRanksNamesBothCalls) {
  Job job(2);
  job.add_group("world", {0, 1});
  job.add_group("dp", {0, 1});
  const Waiting a(job, {"world", "dp"}, 0, [&] { return Call("dp", job.call("dp", 0)); });
  EXPECT_TRUE(job.circles().empty()) << "the other rank computes";
  const Waiting b(job, {"world", "dp"}, 1, [&] { return Call("world", job.call("world", 1)); });
  const auto circles = job.circles();
  ASSERT_EQ(circles.size(), 2u) << "both ranks find it";
  for (const Circle& circle : circles)
    EXPECT_EQ(circle.text(),
              "Ranks wait for each other in different calls, which none of them can leave: rank 0 "
              "waits in all_reduce #1 of group 'dp' for rank 1; rank 1 waits in all_reduce #1 of "
              "group 'world' for rank 0.");
}

TEST(Circle, OfThreeRanksAndGroups) {
  Job job(3);
  job.add_group("x", {0, 1});
  job.add_group("y", {1, 2});
  job.add_group("z", {2, 0});
  const Waiting a(job, {"x", "z"}, 0, [&] { return Call("x", job.call("x", 0)); });
  const Waiting b(job, {"x", "y"}, 1, [&] { return Call("y", job.call("y", 1)); });
  EXPECT_TRUE(job.circles().empty());
  const Waiting c(job, {"y", "z"}, 2, [&] { return Call("z", job.call("z", 2)); });
  const auto circles = job.circles();
  ASSERT_EQ(circles.size(), 3u);
  for (const Circle& circle : circles) {
    ASSERT_EQ(circle.calls.size(), 3u);
    EXPECT_EQ(circle.calls[0].rank, 0);
    EXPECT_THAT(circle.text(), HasSubstr("rank 2 waits in all_reduce #1 of group 'z' for rank 0."));
  }
}

// Ranks 0 and 1 are in one call, and rank 2 is in another: rank 0 finds the circle for both of
// them.
TEST(Circle, IsLeftToTheFirstRankOfACall) {
  Job job(4);
  job.add_group("world", {0, 1, 2, 3});
  job.add_group("dp", {0, 1, 2, 3});
  std::vector<std::unique_ptr<Waiting>> waits;
  for (const int rank : {0, 1, 2})
    waits.push_back(
        std::make_unique<Waiting>(job, std::vector<std::string>{"world", "dp"}, rank,
                                  [&job, rank] { return Call("dp", job.call("dp", rank)); }));
  const Waiting other(job, {"world", "dp"}, 3, [&] { return Call("world", job.call("world", 3)); });
  EXPECT_EQ(job.circles().size(), 2u) << "ranks 0 and 3";
  job.questions = 0;
  EXPECT_FALSE(find_circle(job.rank(2).waits().front().call, job.ask()));
  EXPECT_EQ(job.questions, 1);
}

// A rank waits for a message whose sender waits for that rank in a collective.
TEST(Circle, GoesThroughExchangesAndBroadcasts) {
  for (const bool exchange : {true, false}) {
    Job job(2);
    job.add_group("pp", {0, 1});
    job.add_group("world", {0, 1});
    const Waiting a(job, {"pp", "world"}, 0, [&] {
      return Call("pp", exchange ? job.receive("pp", 0, 1, 7) : job.call("pp", 0, 1));
    });
    const Waiting b(job, {"pp", "world"}, 1, [&] { return Call("world", job.call("world", 1)); });
    EXPECT_EQ(job.circles().size(), 2u);
    if (exchange)
      job.of("pp", 1).note_sent(0, 7);  // the message is on its way
    else
      job.call("pp", 1);
    EXPECT_TRUE(job.circles().empty());
  }
}

TEST(Circle, IsNoneWhereARankMayStillCome) {
  Job job(2);
  job.add_group("x", {0, 1});
  job.add_group("y", {0, 1});
  const Waiting a(job, {"x", "y"}, 0, [&] { return Call("x", job.call("x", 0)); });
  {
    // The call is in flight but nobody waits for it: its rank computes.
    const auto entry = job.call("y", 1);
    EXPECT_TRUE(job.circles().empty());
    job.of("y", 1).mark(entry, State::finished);
  }
  {
    // The thread's call is over, but the thread has not woken up yet.
    const Waiting b(job, {"x", "y"}, 1, [&] {
      const auto entry = job.call("y", 1);
      job.of("y", 1).mark(entry, State::finished);
      return Call("y", entry);
    });
    EXPECT_TRUE(job.circles().empty());
  }
  {
    // The root of a broadcast waits for no rank.
    const Waiting b(job, {"x", "y"}, 1,
                    [&] { return Call("y", job.call("y", 1, Record::kNobody)); });
    EXPECT_TRUE(job.circles().empty());
  }
  {
    // Another thread of the rank makes calls, too, and is not blocked.
    job.add_group("z", {0, 1});
    const Waiting b(job, {"x", "y"}, 1, [&] { return Call("y", job.call("y", 1)); });
    EXPECT_TRUE(job.circles().empty());
    job.leave("z", 1);
    job.leave("z", 0);
    EXPECT_EQ(job.circles().size(), 2u);
    // It has made the call from another thread after all.
    job.call("x", 1);
    EXPECT_TRUE(job.circles().empty());
  }
  {
    // The rank has left the group.
    const Waiting b(job, {"x", "y"}, 1, [&] { return Call("y", job.call("y", 1)); });
    job.leave("x", 1);
    EXPECT_TRUE(job.circles().empty());
  }
}

// A first look may see waits that were never there at the same time; the second look shows that.
TEST(Circle, OfWaitsThatFollowedEachOtherDoesNotLast) {
  Job job(2);
  job.add_group("x", {0, 1});
  job.add_group("y", {0, 1});
  const Waiting a(job, {"x", "y"}, 0, [&] { return Call("x", job.call("x", 0)); });
  std::optional<Circle> circle;
  {
    const Waiting b(job, {"x", "y"}, 1, [&] { return Call("y", job.call("y", 1)); });
    circle = find_circle(job.rank(0).waits().front().call, job.ask());
    ASSERT_TRUE(circle);
    EXPECT_TRUE(still_there(*circle, job.ask()));
  }
  const Waiting later(job, {"y"}, 1, [&] { return Call("y", job.call("y", 1)); });
  EXPECT_FALSE(still_there(*circle, job.ask()));
}

// Rank 1 throws an error before its call, and rank 0 waits there.
TEST(Refusal, IsToldToThoseWhoWait) {
  Job job(3);
  job.add_group("world", {0, 1, 2});
  job.add_group("other", {1, 2});
  const Waiting a(job, {"world"}, 0, [&] { return Call("world", job.call("world", 0)); });
  const auto found = [&] { return find_refusal(job.rank(0).waits().front().call, job.ask()); };
  EXPECT_FALSE(found()) << "the others compute";
  job.of("other", 1).note_refusal("of a group that nobody waits in");
  EXPECT_FALSE(found());
  job.of("world", 1).note_refusal("not with \"this\" model");
  ASSERT_TRUE(found());
  EXPECT_EQ(found()->text(), "Rank 1 does not come to this call. It has thrown this error instead: "
                             "not with \"this\" model");
  EXPECT_TRUE(job.circles().empty());
  job.call("world", 1);
  EXPECT_FALSE(found()) << "it has come after all";
}

TEST(Refusal, OfTheSameOnAllRanksKeepsNobodyWaiting) {
  Job job(2);
  job.add_group("world", {0, 1});
  for (const int rank : {0, 1}) job.of("world", rank).note_refusal("not with this model");
  const Waiting a(job, {"world"}, 0, [&] { return Call("world", job.call("world", 0)); });
  const auto found = [&] { return find_refusal(job.rank(0).waits().front().call, job.ask()); };
  EXPECT_FALSE(found()) << "rank 1 is only slow to go on";
  job.of("world", 1).note_refusal("nor with the next");
  ASSERT_TRUE(found());
  EXPECT_EQ(found()->reason, "nor with the next");
}

TEST(Circle, TextsThatAreNoneAreNobodysAnswer) {
  for (const char* text :
       {"", "[", "{}", "[9]", "[3]", "[3,1,2]", "[3,1,2,3,4,5,6,7,8,9]", "[-1]", "[4]", "[4,1]"})
    EXPECT_EQ(Answer::decode(text).state, Answer::State::at_large) << text;
  for (const char* text :
       {"", "[]", "[1,2,3,4,5]", "[\"x\",-1,0,0,0]", "[\"x\",1,0,0]", "{\"a\":1}"})
    EXPECT_FALSE(Question::decode(text)) << text;
}

// Four ranks train without a mistake: calls of many groups are in flight at once, waited for in
// another order than they were made, by ranks that pause at random. A thread looks for circles all
// the time, and looks again only moments after the first look; the watch would wait longer.
TEST(Circle, IsNoneInAJobAtWork) {
  constexpr int kRanks = 4;
  constexpr int kSteps = 100;
  Job job(kRanks);
  const std::map<std::string, std::vector<int>> groups = {
      {"world", {0, 1, 2, 3}}, {"dp", {3, 2, 1, 0}}, {"left", {0, 1}},
      {"right", {2, 3}},       {"even", {0, 2}},     {"odd", {1, 3}}};
  for (const auto& [id, ranks] : groups) job.add_group(id, ranks);
  std::atomic<int> running = kRanks;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      std::minstd_rand random(static_cast<unsigned>(rank + 1));
      std::minstd_rand order(7);  // the same order on all ranks
      const auto pause = [&] {
        if (random() % 8 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      };
      for (int step = 0; step < kSteps; ++step) {
        std::vector<std::string> ids;
        for (const auto& group : groups) ids.push_back(group.first);
        std::shuffle(ids.begin(), ids.end(), order);
        std::vector<std::pair<std::string, std::uint64_t>> in_flight;
        for (const std::string& id : ids) {
          const auto& ranks = groups.at(id);
          if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
          pause();
          in_flight.emplace_back(id, job.call(id, rank));
        }
        std::shuffle(in_flight.begin(), in_flight.end(), random);
        for (const auto& [id, entry] : in_flight) {
          Recorder& mine = job.of(id, rank);
          const std::uint64_t sequence = mine.entry(entry)->sequence;
          const Recorder::Block block(mine, entry);
          for (const int other : groups.at(id))
            while (job.of(id, other).last_sequence() < sequence) std::this_thread::yield();
          mine.mark(entry, State::finished);
        }
      }
      --running;
    });
  int looks = 0;
  while (running > 0) {
    ++looks;
    for (const Circle& circle : job.circles()) ADD_FAILURE() << circle.text();
    if (::testing::Test::HasFailure()) break;
  }
  threads.clear();
  EXPECT_GT(looks, 0);
}

}  // namespace
}  // namespace lockstep::flight
