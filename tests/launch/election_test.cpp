// The election of a job's leader through etcd: with the real etcd, and with impostors in its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <lockstep/launch/rendezvous/election.h>
#include <lockstep/launch/rendezvous/etcd.h>

#include "../base/errors.h"
#include "etcd_server.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using Leadership = Election::Leadership;
using Wish = Election::Wish;

Deadline soon() { return Deadline::after(milliseconds(20'000)); }

TEST(EtcdAnswers, AreReadWithSuspicion) {
  const std::string value =
      R"({"key":"aw==","create_revision":"2","mod_revision":"3","value":"eHl6","lease":"7"})";
  const Etcd::Outcome outcome = parse_outcome(
      R"({"header":{"revision":"5"},"succeeded":true,"responses":[{"response_put":{}},)"
      R"({"response_range":{"kvs":[)" +
          value + R"(],"count":"1"}},{"response_range":{}}]})",
      2);
  EXPECT_TRUE(outcome.held);
  EXPECT_EQ(outcome.revision, 5);
  EXPECT_EQ(outcome.values[0].text, "xyz");
  EXPECT_EQ(outcome.values[0].create_revision, 2);
  EXPECT_EQ(outcome.values[0].mod_revision, 3);
  EXPECT_EQ(outcome.values[0].lease, 7);
  EXPECT_FALSE(outcome.values[1].exists());

  const auto with = [](const std::string& entry) {
    return R"({"header":{},"responses":[{"response_range":{"kvs":)" + entry + "}}]}";
  };
  for (const std::string& text :
       {std::string(""), std::string("nonsense"), std::string("[]"), std::string("{}"),
        std::string(R"({"header":{}})"), std::string(R"({"header":{"revision":"x"}})"),
        std::string(R"({"header":{"revision":-1},"responses":[{"response_range":{}}]})"),
        std::string(R"({"header":{},"succeeded":"yes","responses":[{"response_range":{}}]})"),
        std::string(R"({"header":{},"responses":{}})"),
        std::string(R"({"header":{},"responses":[3]})"),
        std::string(R"({"header":{},"responses":[{"response_put":{}}]})"), with("[]"), with("7"),
        with("[1]"), with("[{}]"), with("[" + value + "," + value + "]"),
        with(R"([{"create_revision":"2","value":"?"}])"),
        with(R"([{"create_revision":"2","value":3}])"),
        with(R"([{"create_revision":"99999999999999999999"}])")})
    EXPECT_EQ(comm_error([&] { parse_outcome(text, 1); }).first, Fault::corrupted) << text;

  EXPECT_EQ(parse_granted_lease(R"({"ID":"12","TTL":"4"})").ttl, milliseconds(4000));
  for (const char* text : {R"({"ID":"12"})", R"({"TTL":"4"})", R"({"ID":"12","TTL":"-4"})"})
    EXPECT_EQ(comm_error([&] { parse_granted_lease(text); }).first, Fault::corrupted) << text;
  EXPECT_EQ(parse_kept_lease(R"({"result":{"ID":"12","TTL":"4"}})"), milliseconds(4000));
  EXPECT_EQ(parse_kept_lease(R"({"result":{"ID":"12"}})"), milliseconds(0));
  EXPECT_EQ(comm_error([&] { parse_kept_lease(R"({"result":4})"); }).first, Fault::corrupted);
}

class ElectionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ETCD_OR_SKIP();
    ASSERT_TRUE(server_.start()) << server_.log();
  }

  std::unique_ptr<Election> candidate(int port) {
    return std::make_unique<Election>(std::vector{server_.address()}, "job",
                                      net::Address{"127.0.0.1", port});
  }

  static bool becomes(const Election& election, Leadership leadership) {
    return eventually(milliseconds(60'000),
                      [&] { return election.status().leadership == leadership; });
  }

  Etcd::Value value_of(const std::string& key) {
    return Etcd({server_.address()}).transact({.reads = {key}}, soon()).values[0];
  }

  EtcdServer server_;
};

TEST_F(ElectionTest, OneIsElectedAndTheOthersLearnWhere) {
  std::vector<std::unique_ptr<Election>> all;
  for (int i = 0; i < 4; ++i) all.push_back(candidate(1000 + i));
  for (const auto& one : all) one->wish(Wish::campaign);
  const auto num_leaders = [&] {
    int count = 0;
    for (const auto& one : all) count += one->status().leadership == Leadership::ours;
    return count;
  };
  // It is renewed, so there is one leader after the lease, too.
  ASSERT_TRUE(eventually(milliseconds(60'000), [&] { return num_leaders() == 1; }));
  EXPECT_FALSE(
      eventually(Election::kLease + milliseconds(1000), [&] { return num_leaders() != 1; }));
  std::size_t leader = 0;
  while (all[leader]->status().leadership != Leadership::ours) ++leader;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i == leader) continue;
    ASSERT_TRUE(becomes(*all[i], Leadership::others));
    EXPECT_EQ(all[i]->status().leader.port, 1000 + static_cast<int>(leader));
    EXPECT_EQ(all[i]->status().term, 1);
  }
  all[leader]->confirm(3);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] { return all[leader]->confirmed() == 3; }));
  EXPECT_THAT(value_of("lockstep/job/leader").text, HasSubstr("\"generation\":3"));
  // A leader that leaves frees its place at once and leaves no keys behind.
  for (auto& one : all)
    if (one != all[leader]) one.reset();
  all[leader].reset();
  EXPECT_FALSE(value_of("lockstep/job/leader").exists());
  EXPECT_FALSE(value_of("lockstep/job/term").exists());
}

TEST_F(ElectionTest, WhoWasFollowedByAnotherHasLostIt) {
  const auto first = candidate(1000);
  first->wish(Wish::campaign);
  ASSERT_TRUE(becomes(*first, Leadership::ours));
  // Puts etcd into the state after the leader's lease ended while it was stopped, and another
  // leader was elected and lost.
  Etcd etcd({server_.address()});
  etcd.transact({.puts = {{"lockstep/job/term", "2", 0}}, .erased = {"lockstep/job/leader"}},
                soon());
  ASSERT_TRUE(becomes(*first, Leadership::lost));
  etcd.transact({.puts = {{"lockstep/job/leader", R"({"address":"127.0.0.1:1001"})", 0}}}, soon());
  first->confirm(1);
  EXPECT_FALSE(eventually(milliseconds(1500), [&] { return first->confirmed().has_value(); }));
  first->wish(Wish::campaign);
  ASSERT_TRUE(becomes(*first, Leadership::others));
  EXPECT_EQ(first->status().leader.port, 1001);
  etcd.transact({.erased = {"lockstep/job/leader"}}, soon());
  ASSERT_TRUE(becomes(*first, Leadership::ours));
  EXPECT_EQ(first->status().term, 3);
}

TEST_F(ElectionTest, ALeaseThatEndedWithNobodyElseThereCostsNothing) {
  const auto first = candidate(1000);
  first->wish(Wish::campaign);
  ASSERT_TRUE(becomes(*first, Leadership::ours));
  server_.kill(SIGSTOP);
  EXPECT_TRUE(becomes(*first, Leadership::doubtful));
  first->confirm(1);
  EXPECT_FALSE(eventually(Election::kLease, [&] { return first->confirmed().has_value(); }));
  server_.kill(SIGCONT);
  EXPECT_TRUE(becomes(*first, Leadership::ours));
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] { return first->confirmed() == 1; }));
}

TEST_F(ElectionTest, WhoDoesNotWantToLeadGivesItUp) {
  const auto first = candidate(1000);
  const auto second = candidate(1001);
  first->wish(Wish::campaign);
  ASSERT_TRUE(becomes(*first, Leadership::ours));
  first->wish(Wish::idle);
  second->wish(Wish::campaign);
  ASSERT_TRUE(becomes(*second, Leadership::ours));
  EXPECT_EQ(second->status().term, 2);
}

TEST_F(ElectionTest, KeysOfStrangersAreNoAddresses) {
  Etcd etcd({server_.address()});
  for (const std::string& text :
       {std::string("nonsense"), std::string("{}"), std::string(R"({"address":7})"),
        std::string(R"({"address":"host:port"})"), std::string(R"({"address":"127.0.0.1:0"})"),
        R"({"address":")" + std::string(500, 'a') + ":1\"}", std::string("\xff\x00[", 3)}) {
    etcd.transact({.puts = {{"lockstep/job/leader", text, 0}}}, soon());
    const auto first = candidate(1000);
    first->wish(Wish::campaign);
    EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
      return first->status().trouble.find("does not hold a launcher's address") !=
             std::string::npos;
    })) << text;
    EXPECT_EQ(first->status().leadership, Leadership::unknown);
  }
}

TEST_F(ElectionTest, AnotherMemberAnswersForOneThatIsGone) {
  const net::Address nowhere{"127.0.0.1", 1};
  Election election({nowhere, server_.address()}, "job", {"127.0.0.1", 1000});
  election.wish(Wish::campaign);
  EXPECT_TRUE(becomes(election, Leadership::ours));
  EXPECT_EQ(election.status().trouble, "");
}

}  // namespace
}  // namespace lockstep::launch::testing
