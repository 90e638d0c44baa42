// Who holds the office of node 0 by etcd's word: the real etcd, and strangers in its place.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <lockstep/elastic/election.h>
#include <lockstep/elastic/etcd.h>

#include "../base/errors.h"
#include "etcd_server.h"

namespace lockstep::elastic::testing {
namespace {

using ::testing::HasSubstr;
using Office = Election::Office;
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

  static bool becomes(const Election& election, Office office) {
    return eventually(milliseconds(20'000), [&] { return election.standing().office == office; });
  }

  Etcd::Value value_of(const std::string& key) {
    return Etcd({server_.address()}).transact({.reads = {key}}, soon()).values[0];
  }

  EtcdServer server_;
};

TEST_F(ElectionTest, OneIsElectedAndTheOthersLearnWhere) {
  std::vector<std::unique_ptr<Election>> all;
  for (int i = 0; i < 4; ++i) all.push_back(candidate(1000 + i));
  for (const auto& one : all) one->wish(Wish::stand);
  const auto in_office = [&] {
    int count = 0;
    for (const auto& one : all) count += one->standing().office == Office::ours;
    return count;
  };
  ASSERT_TRUE(eventually(milliseconds(20'000), [&] { return in_office() == 1; }));
  // Past the lease, too: it is renewed.
  EXPECT_FALSE(eventually(Election::kLease + milliseconds(1000), [&] { return in_office() != 1; }));
  std::size_t hub = 0;
  while (all[hub]->standing().office != Office::ours) ++hub;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i == hub) continue;
    ASSERT_TRUE(becomes(*all[i], Office::others));
    EXPECT_EQ(all[i]->standing().hub.port, 1000 + static_cast<int>(hub));
    EXPECT_EQ(all[i]->standing().term, 1);
  }
  all[hub]->confirm(3);
  EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return all[hub]->confirmed() == 3; }));
  EXPECT_THAT(value_of("lockstep/job/hub").text, HasSubstr("\"generation\":3"));
  // One that leaves frees the office at once, and leaves nothing behind.
  for (auto& one : all)
    if (one != all[hub]) one.reset();
  all[hub].reset();
  EXPECT_FALSE(value_of("lockstep/job/hub").exists());
  EXPECT_FALSE(value_of("lockstep/job/term").exists());
}

TEST_F(ElectionTest, WhoWasFollowedByAnotherHasLostIt) {
  const auto first = candidate(1000);
  first->wish(Wish::stand);
  ASSERT_TRUE(becomes(*first, Office::ours));
  // As if its lease had ended while it was stopped, and another had been elected, and lost as well.
  Etcd etcd({server_.address()});
  etcd.transact({.puts = {{"lockstep/job/term", "2", 0}}, .erased = {"lockstep/job/hub"}}, soon());
  ASSERT_TRUE(becomes(*first, Office::lost));
  etcd.transact({.puts = {{"lockstep/job/hub", R"({"address":"127.0.0.1:1001"})", 0}}}, soon());
  first->confirm(1);
  EXPECT_FALSE(eventually(milliseconds(1500), [&] { return first->confirmed().has_value(); }));
  first->wish(Wish::stand);
  ASSERT_TRUE(becomes(*first, Office::others));
  EXPECT_EQ(first->standing().hub.port, 1001);
  etcd.transact({.erased = {"lockstep/job/hub"}}, soon());
  ASSERT_TRUE(becomes(*first, Office::ours));
  EXPECT_EQ(first->standing().term, 3);
}

TEST_F(ElectionTest, ALeaseThatEndedWithNobodyElseThereCostsNothing) {
  const auto first = candidate(1000);
  first->wish(Wish::stand);
  ASSERT_TRUE(becomes(*first, Office::ours));
  server_.kill(SIGSTOP);
  EXPECT_TRUE(becomes(*first, Office::doubtful));
  first->confirm(1);
  EXPECT_FALSE(eventually(Election::kLease, [&] { return first->confirmed().has_value(); }));
  server_.kill(SIGCONT);
  EXPECT_TRUE(becomes(*first, Office::ours));
  EXPECT_TRUE(eventually(milliseconds(20'000), [&] { return first->confirmed() == 1; }));
}

TEST_F(ElectionTest, WhoDoesNotWantTheOfficeGivesItBack) {
  const auto first = candidate(1000);
  const auto second = candidate(1001);
  first->wish(Wish::stand);
  ASSERT_TRUE(becomes(*first, Office::ours));
  first->wish(Wish::rest);
  second->wish(Wish::stand);
  ASSERT_TRUE(becomes(*second, Office::ours));
  EXPECT_EQ(second->standing().term, 2);
}

TEST_F(ElectionTest, KeysOfStrangersAreNoAddresses) {
  Etcd etcd({server_.address()});
  for (const std::string& text :
       {std::string("nonsense"), std::string("{}"), std::string(R"({"address":7})"),
        std::string(R"({"address":"host:port"})"), std::string(R"({"address":"127.0.0.1:0"})"),
        R"({"address":")" + std::string(500, 'a') + ":1\"}", std::string("\xff\x00[", 3)}) {
    etcd.transact({.puts = {{"lockstep/job/hub", text, 0}}}, soon());
    const auto first = candidate(1000);
    first->wish(Wish::stand);
    EXPECT_TRUE(eventually(milliseconds(20'000), [&] {
      return first->standing().trouble.find("does not hold a launcher's address") !=
             std::string::npos;
    })) << text;
    EXPECT_EQ(first->standing().office, Office::unknown);
  }
}

TEST_F(ElectionTest, AnotherMemberAnswersForOneThatIsGone) {
  const net::Address nowhere{"127.0.0.1", 1};
  Election election({nowhere, server_.address()}, "job", {"127.0.0.1", 1000});
  election.wish(Wish::stand);
  EXPECT_TRUE(becomes(election, Office::ours));
  EXPECT_EQ(election.standing().trouble, "");
}

}  // namespace
}  // namespace lockstep::elastic::testing
