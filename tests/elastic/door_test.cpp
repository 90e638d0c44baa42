// Who gets in at a launcher's door.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/elastic/door.h>
#include <lockstep/elastic/knock.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "../base/errors.h"
#include "launched.h"

namespace lockstep::elastic::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

Deadline shortly() { return Deadline::after(milliseconds(20'000)); }

class DoorTest : public ::testing::Test {
 protected:
  std::vector<Arrival> arrivals() {
    std::vector<Arrival> all;
    eventually(milliseconds(20'000), [&] {
      for (Arrival& arrival : door_.arrivals()) all.push_back(std::move(arrival));
      return !all.empty();
    });
    return all;
  }

  // A launcher that says who it is, and does not wait for an answer.
  Channel come_in(const std::string& host) {
    net::Fd socket = net::connect_tcp(door_.address(), shortly());
    net::introduce(socket, secret_, kLauncherPurpose, shortly());
    Channel channel(std::move(socket));
    channel.send("hello", Introduction{.host = host}.encode());
    return channel;
  }

  net::Secret secret_ = net::Secret::random();
  Door door_{{"127.0.0.1", 0}, secret_};
};

TEST_F(DoorTest, WhoKnowsTheSecretComesIn) {
  const Channel channel = come_in("b");
  const auto came = arrivals();
  ASSERT_THAT(came, SizeIs(1));
  EXPECT_EQ(came[0].introduction.host, "b");
}

TEST_F(DoorTest, ACrowdOfStrangersHoldsUpNobody) {
  std::vector<net::Fd> strangers;
  for (int i = 0; i < 600; ++i) {
    strangers.push_back(net::connect_tcp(door_.address(), shortly()));
    if (i % 2 == 0) {
      const std::vector<std::byte> noise(1 + static_cast<std::size_t>(i) % 100, std::byte(i));
      net::write_all(strangers.back(), noise, shortly());
    }
  }
  const Channel channel = come_in("genuine");
  const auto came = arrivals();
  ASSERT_THAT(came, SizeIs(1));
  EXPECT_EQ(came[0].introduction.host, "genuine");
}

TEST_F(DoorTest, OtherPurposesAndWordsAreDropped) {
  const net::Fd other = net::connect_tcp(door_.address(), shortly());
  net::introduce(other, secret_, "something else", shortly());
  std::array<std::byte, 1> byte;
  EXPECT_EQ(comm_error([&] { net::read_all(other, byte, shortly()); }).first, Fault::peer_lost);
  for (const char* words : {"goodbye {}\n", "hello nonsense\n", "hello {\"host\":1}\n"}) {
    const net::Fd socket = net::connect_tcp(door_.address(), shortly());
    net::introduce(socket, secret_, kLauncherPurpose, shortly());
    net::write_all(socket, std::as_bytes(std::span(std::string_view(words))), shortly());
    EXPECT_EQ(comm_error([&] { net::read_all(socket, byte, shortly()); }).first, Fault::peer_lost);
  }
  EXPECT_THAT(door_.arrivals(), SizeIs(0));
}

TEST_F(DoorTest, SendsOthersWhereTheyShouldGo) {
  door_.send_away("elsewhere", "10.0.0.7:4000");
  const Visit visited = visit(door_.address(), {.host = "b"}, secret_, shortly());
  EXPECT_EQ(visited.outcome, Visit::Outcome::elsewhere);
  EXPECT_EQ(visited.hub.text(), "10.0.0.7:4000");
  door_.send_away("nobody", "");
  EXPECT_EQ(visit(door_.address(), {.host = "b"}, secret_, shortly()).outcome,
            Visit::Outcome::not_yet);
  door_.send_away("refused", "you are one too many");
  EXPECT_THAT(comm_error([&] { visit(door_.address(), {.host = "b"}, secret_, shortly()); }).second,
              HasSubstr("you are one too many"));
  EXPECT_THAT(door_.arrivals(), SizeIs(0));
}

TEST_F(DoorTest, AVisitTellsStrangersFromThoseWhoAreNotThere) {
  const net::Fd silent = net::listen_tcp({"127.0.0.1", 0});
  const net::Address there{"127.0.0.1", net::local_port(silent)};
  EXPECT_EQ(visit(there, {}, secret_, Deadline::after(milliseconds(200))).outcome,
            Visit::Outcome::stranger);
  const net::Address nowhere{"127.0.0.1", net::local_port(net::listen_tcp({"127.0.0.1", 0}))};
  EXPECT_EQ(visit(nowhere, {}, secret_, shortly()).outcome, Visit::Outcome::unreachable);
  const auto [fault, text] =
      comm_error([&] { visit(door_.address(), {}, net::Secret::random(), shortly()); });
  EXPECT_EQ(fault, Fault::refused);
  EXPECT_THAT(text, HasSubstr("does not know this job's secret"));
}

}  // namespace
}  // namespace lockstep::elastic::testing
