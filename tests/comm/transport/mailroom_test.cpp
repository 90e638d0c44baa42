// The memory that an endpoint keeps for groups that are over or yet to come is bounded, and no
// descriptor stays behind.
#include <poll.h>
#include <sys/socket.h>

#include <gtest/gtest.h>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/net/socket.h>

#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

constexpr milliseconds kNow(0);
constexpr milliseconds kSoon(20'000);

bool hung_up(const net::Fd& connection) {
  pollfd polled{connection.get(), POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0;
}

bool readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, 0) > 0;
}

// Delivers one end of a connection and returns the other.
net::Fd deliver(Mailroom& room, const std::string& group, int from,
                Clock::time_point now = Clock::now()) {
  auto [here, there] = net::socket_pair();
  room.deliver(group, from, std::move(here), now);
  return std::move(there);
}

TEST(Mailroom, KeepsWhatComesEarly) {
  Mailroom room;
  const net::Fd peer = deliver(room, "a", 3);
  EXPECT_TRUE(room.state("a").open);
  EXPECT_FALSE(room.state("b").open);
  const auto box = room.open("a");
  EXPECT_FALSE(hung_up(peer));
  EXPECT_TRUE(box->take(3, Deadline::after(kNow)));
}

TEST(Mailroom, ForgetsTheOldestFailures) {
  Mailroom room({.most_failed = 3});
  for (const char* group : {"d", "c", "b", "a"}) room.close(group, {.explanation = group});
  EXPECT_FALSE(room.state("d").notice);
  for (const char* group : {"c", "b", "a"}) {
    ASSERT_TRUE(room.state(group).notice) << group;
    EXPECT_EQ(room.state(group).notice->explanation, group);
  }
}

TEST(Mailroom, TheFirstReasonCounts) {
  Mailroom room;
  room.close("a", {.explanation = "first"});
  room.close("a", {.explanation = "second"});
  EXPECT_EQ(room.state("a").notice->explanation, "first");
}

TEST(Mailroom, TurnsAwayWhoComesForAGroupThatIsOver) {
  Mailroom room;
  auto left = room.open("left");
  const net::Fd waiting = deliver(room, "left", 1);
  left.reset();
  EXPECT_TRUE(hung_up(waiting));
  EXPECT_TRUE(hung_up(deliver(room, "left", 1)));
  EXPECT_FALSE(room.state("left").open);
  const auto next = room.open("next");  // opening a group tidies up
  EXPECT_TRUE(hung_up(deliver(room, "left", 1)));
  EXPECT_FALSE(room.state("left").open);
  room.close("failed", {});
  EXPECT_TRUE(hung_up(deliver(room, "failed", 1)));
  EXPECT_FALSE(room.state("failed").open);
  EXPECT_FALSE(room.sweep());
}

TEST(Mailroom, AnIdIsUsedOnce) {
  Mailroom room;
  room.open("a");
  EXPECT_THROW(room.open("a"), InternalError);
}

TEST(Mailroom, RemembersOnlySoManyGroups) {
  Mailroom room({.most_left = 2});
  for (const char* group : {"a", "b", "c"}) room.open(group);
  const auto now = room.open("d");
  EXPECT_TRUE(hung_up(deliver(room, "c", 1)));
  EXPECT_FALSE(hung_up(deliver(room, "a", 1)));  // it is forgotten by now
}

TEST(Mailroom, BoundsTheGroupsThatNeverCome) {
  Mailroom room({.most_early_groups = 2});
  const net::Fd first = deliver(room, "z", 0);
  const net::Fd second = deliver(room, "a", 0);
  EXPECT_FALSE(hung_up(first));
  const net::Fd third = deliver(room, "m", 0);
  EXPECT_TRUE(hung_up(first));
  EXPECT_FALSE(room.state("z").open);
  EXPECT_FALSE(hung_up(second) || hung_up(third));
}

TEST(Mailroom, BoundsTheConnectionsThatNobodyTakes) {
  Mailroom room({.most_early_connections = 3});
  const net::Fd old = deliver(room, "old", 0);
  std::vector<net::Fd> flood;
  for (int from = 0; from < 3; ++from) flood.push_back(deliver(room, "flood", from));
  EXPECT_TRUE(hung_up(old));
  for (const net::Fd& one : flood) EXPECT_FALSE(hung_up(one));
  flood.push_back(deliver(room, "flood", 3));
  for (const net::Fd& one : flood) EXPECT_TRUE(hung_up(one));
}

TEST(Mailroom, SweepsWhatWasGivenUp) {
  Mailroom room({.hung_up_time = milliseconds(1000)});
  const auto start = Clock::now();
  const net::Fd patient = deliver(room, "patient", 0, start);
  { const net::Fd gone = deliver(room, "gone", 0, start); }
  // Connections of a peer that has left may be for a rank that is late.
  EXPECT_TRUE(room.sweep(start + milliseconds(999)));
  EXPECT_TRUE(room.state("gone").open);
  EXPECT_TRUE(room.sweep(start + milliseconds(1000)));
  EXPECT_FALSE(room.state("gone").open);
  EXPECT_TRUE(room.state("patient").open);
  EXPECT_FALSE(hung_up(patient));
}

TEST(Mailbox, KeepsOnlyRanksThatAreExpected) {
  Mailroom room;
  const auto box = room.open("a");
  const net::Fd good = deliver(room, "a", 1);
  const net::Fd bad = deliver(room, "a", 7);
  box->keep_only({1, 2});
  EXPECT_TRUE(hung_up(bad));
  EXPECT_FALSE(hung_up(good));
  EXPECT_TRUE(box->take(1, Deadline::after(kNow)));
  EXPECT_TRUE(hung_up(deliver(room, "a", 0)));
  EXPECT_FALSE(readable(box->event()));
  const net::Fd again = deliver(room, "a", 2);
  EXPECT_TRUE(readable(box->event()));
}

// A late connection must not bring a group back to life: ranks that ask would wait for it.
TEST(Endpoint, SaysThatAGroupWasLeft) {
  const auto ends = make_endpoints(2, net::Secret::random());
  const auto ask = [&] {
    const Deadline soon = Deadline::after(kSoon);
    return ends[1]->ask(net::connect_tcp(ends[0]->address().tcp, soon), "g", soon);
  };
  EXPECT_FALSE(ask().open);
  auto box = ends[0]->open("g");
  EXPECT_TRUE(ask().open);
  box.reset();
  EXPECT_FALSE(ask().open);
  const Deadline soon = Deadline::after(kSoon);
  const net::Fd late = ends[1]->connect(ends[0]->address(), "g", 1, Medium::tcp, soon);
  EXPECT_TRUE(net::wait_ready(late.get(), POLLRDHUP, soon));
  EXPECT_FALSE(ask().open);
}

}  // namespace
}  // namespace lockstep::comm::testing
