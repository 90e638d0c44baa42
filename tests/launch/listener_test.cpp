// A launcher's listener accepts the right connections, and no others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/launch/rendezvous/connection.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "../base/errors.h"
#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

Deadline shortly() { return Deadline::after(milliseconds(20'000)); }

class ListenerTest : public ::testing::Test {
 protected:
  std::vector<Arrival> arrivals() {
    std::vector<Arrival> all;
    eventually(milliseconds(20'000), [&] {
      for (Arrival& arrival : listener_.arrivals()) all.push_back(std::move(arrival));
      return !all.empty();
    });
    return all;
  }

  // Connects as a launcher, introduces itself, and does not wait for an answer.
  Connection connect_as(const std::string& host) {
    net::Fd socket = net::connect_tcp(listener_.address(), shortly());
    net::introduce(socket, secret_, kLauncherPurpose, shortly());
    Connection connection(std::move(socket));
    connection.send("hello", Introduction{.host = host}.encode());
    return connection;
  }

  net::Secret secret_ = net::Secret::random();
  Listener listener_{{"127.0.0.1", 0}, secret_};
};

TEST_F(ListenerTest, WhoKnowsTheSecretComesIn) {
  const Connection connection = connect_as("b");
  const auto came = arrivals();
  ASSERT_THAT(came, SizeIs(1));
  EXPECT_EQ(came[0].introduction.host, "b");
}

TEST_F(ListenerTest, ACrowdOfStrangersHoldsUpNobody) {
  std::vector<net::Fd> strangers;
  for (int i = 0; i < 600; ++i) {
    strangers.push_back(net::connect_tcp(listener_.address(), shortly()));
    if (i % 2 == 0) {
      const std::vector<std::byte> noise(1 + static_cast<std::size_t>(i) % 100, std::byte(i));
      net::write_all(strangers.back(), noise, shortly());
    }
  }
  const Connection connection = connect_as("genuine");
  const auto came = arrivals();
  ASSERT_THAT(came, SizeIs(1));
  EXPECT_EQ(came[0].introduction.host, "genuine");
}

TEST_F(ListenerTest, OtherPurposesAndWordsAreDropped) {
  const net::Fd other = net::connect_tcp(listener_.address(), shortly());
  net::introduce(other, secret_, "something else", shortly());
  std::array<std::byte, 1> byte;
  EXPECT_EQ(comm_error([&] { net::read_all(other, byte, shortly()); }).first, Fault::peer_lost);
  for (const char* words : {"goodbye {}\n", "hello nonsense\n", "hello {\"host\":1}\n"}) {
    const net::Fd socket = net::connect_tcp(listener_.address(), shortly());
    net::introduce(socket, secret_, kLauncherPurpose, shortly());
    net::write_all(socket, std::as_bytes(std::span(std::string_view(words))), shortly());
    EXPECT_EQ(comm_error([&] { net::read_all(socket, byte, shortly()); }).first, Fault::peer_lost);
  }
  EXPECT_THAT(listener_.arrivals(), SizeIs(0));
}

TEST_F(ListenerTest, SendsOthersWhereTheyShouldGo) {
  listener_.turn_away("redirected", "10.0.0.7:4000");
  const Attempt attempt = try_to_join(listener_.address(), {.host = "b"}, secret_, shortly());
  EXPECT_EQ(attempt.outcome, Attempt::Outcome::redirected);
  EXPECT_EQ(attempt.leader.text(), "10.0.0.7:4000");
  listener_.turn_away("nobody");
  EXPECT_EQ(try_to_join(listener_.address(), {.host = "b"}, secret_, shortly()).outcome,
            Attempt::Outcome::not_ready);
  listener_.turn_away("refused", "you are one too many");
  EXPECT_THAT(comm_error([&] {
                try_to_join(listener_.address(), {.host = "b"}, secret_, shortly());
              }).second,
              HasSubstr("you are one too many"));
  EXPECT_THAT(listener_.arrivals(), SizeIs(0));
}

TEST_F(ListenerTest, AnAttemptTellsStrangersFromThoseWhoAreNotThere) {
  const net::Fd silent = net::listen_tcp({"127.0.0.1", 0});
  const net::Address there{"127.0.0.1", net::local_port(silent)};
  EXPECT_EQ(try_to_join(there, {}, secret_, Deadline::after(milliseconds(200))).outcome,
            Attempt::Outcome::stranger);
  const net::Address nowhere{"127.0.0.1", net::local_port(net::listen_tcp({"127.0.0.1", 0}))};
  EXPECT_EQ(try_to_join(nowhere, {}, secret_, shortly()).outcome, Attempt::Outcome::unreachable);
  const auto [fault, text] =
      comm_error([&] { try_to_join(listener_.address(), {}, net::Secret::random(), shortly()); });
  EXPECT_EQ(fault, Fault::refused);
  EXPECT_THAT(text, HasSubstr("does not know this job's secret"));
}

}  // namespace
}  // namespace lockstep::launch::testing
