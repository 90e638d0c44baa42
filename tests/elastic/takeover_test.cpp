// A launcher that takes the place of node 0: whom it counts before it forms the job anew.
#include <gtest/gtest.h>

#include <thread>

#include <lockstep/elastic/hub.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "launched.h"

namespace lockstep::elastic::testing {
namespace {

class Takeover : public ::testing::Test {
 protected:
  Takeover() { hub_.announce_ready(); }

  static Layout last() {
    Layout layout{.generation = 4, .num_restarts = 1, .max_restarts = 5};
    layout.nodes = {{"a", 1, ""}, {"b", 1, ""}, {"c", 1, ""}};
    layout.node_rank = 1;
    return layout;
  }

  // Host c, of the same generation.
  Channel fellow() const {
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    net::Fd socket = net::connect_tcp(door_->address(), deadline);
    net::introduce(socket, secret_, kLauncherPurpose, deadline);
    Channel channel(std::move(socket));
    channel.send(
        "hello",
        Introduction{
            .min_nodes = 1, .max_nodes = 3, .host = "c", .last_generation = 4, .last_node_rank = 2}
            .encode());
    return channel;
  }

  // Lets the hub work until the fellow hears the word; false where it does not by then.
  bool hears(Channel& channel, const std::string& word, milliseconds longest) {
    return eventually(longest, [&] {
      hub_.attend();
      channel.send("alive");
      const auto message = channel.receive();
      return message && message->word == word;
    });
  }

  const net::Secret secret_ = net::Secret::random();
  const std::shared_ptr<Door> door_ = std::make_shared<Door>(net::Address{"127.0.0.1", 0}, secret_);
  Hub hub_{{.min_nodes = 1, .max_nodes = 3, .max_restarts = 5, .timeout = milliseconds(20'000)},
           secret_,
           door_,
           nullptr,
           last(),
           {Decision::Action::restart, Failure{.kind = Failure::Kind::node_lost}, ""}};
};

TEST_F(Takeover, IsOnlyWithThoseWhoConfirm) {
  Channel channel = fellow();
  ASSERT_TRUE(hears(channel, "confirm", milliseconds(20'000)));
  EXPECT_FALSE(hears(channel, "layout", milliseconds(500)));
  EXPECT_FALSE(hub_.next_layout());
  channel.send("confirmed");
  EXPECT_TRUE(hears(channel, "layout", milliseconds(20'000)));
  const auto layout = hub_.next_layout();
  ASSERT_TRUE(layout);
  EXPECT_EQ(layout->generation, 5);
  EXPECT_EQ(layout->num_nodes(), 2);
}

TEST_F(Takeover, WhoLeavesBeforeConfirmingDoesNotCount) {
  {
    Channel channel = fellow();
    ASSERT_TRUE(hears(channel, "confirm", milliseconds(20'000)));
  }
  // One of three is not more than half.
  EXPECT_TRUE(eventually(milliseconds(20'000), [&] {
    hub_.attend();
    return hub_.decision()->action == Decision::Action::end;
  }));
  EXPECT_FALSE(hub_.next_layout());
}

}  // namespace
}  // namespace lockstep::elastic::testing
