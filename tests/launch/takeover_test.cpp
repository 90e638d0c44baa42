// A launcher takes the place of node 0: which hosts it counts before it forms the job anew.
#include <gtest/gtest.h>

#include <thread>

#include <lockstep/launch/rendezvous/leader.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

class Takeover : public ::testing::Test {
 protected:
  Takeover() { leader_.announce_ready(); }

  static RankTable last() {
    RankTable table{.generation = 4, .num_restarts = 1, .max_restarts = 5};
    table.nodes = {{"a", 1, ""}, {"b", 1, ""}, {"c", 1, ""}};
    table.node_rank = 1;
    return table;
  }

  // Connects as host c, of the same generation.
  Connection survivor() const {
    const Deadline deadline = Deadline::after(milliseconds(20'000));
    net::Fd socket = net::connect_tcp(listener_->address(), deadline);
    net::introduce(socket, secret_, kLauncherPurpose, deadline);
    Connection connection(std::move(socket));
    connection.send(
        "hello",
        Introduction{
            .min_nodes = 1, .max_nodes = 3, .host = "c", .last_generation = 4, .last_node_rank = 2}
            .encode());
    return connection;
  }

  // Lets the leader work until the survivor receives the word; false if it does not in time.
  bool hears(Connection& connection, const std::string& word, milliseconds longest) {
    return eventually(longest, [&] {
      leader_.attend();
      connection.send("alive");
      const auto message = connection.receive();
      return message && message->word == word;
    });
  }

  const net::Secret secret_ = net::Secret::random();
  const std::shared_ptr<Listener> listener_ =
      std::make_shared<Listener>(net::Address{"127.0.0.1", 0}, secret_);
  Leader leader_{
      {.min_nodes = 1, .max_nodes = 3, .max_restarts = 5, .timeout = milliseconds(20'000)},
      secret_,
      listener_,
      nullptr,
      last(),
      {Decision::Action::restart, Failure{.kind = Failure::Kind::node_lost}, ""}};
};

TEST_F(Takeover, IsOnlyWithThoseWhoConfirm) {
  Connection connection = survivor();
  ASSERT_TRUE(hears(connection, "confirm", milliseconds(20'000)));
  EXPECT_FALSE(hears(connection, "layout", milliseconds(500)));
  EXPECT_FALSE(leader_.next_table());
  connection.send("confirmed");
  EXPECT_TRUE(hears(connection, "layout", milliseconds(20'000)));
  const auto table = leader_.next_table();
  ASSERT_TRUE(table);
  EXPECT_EQ(table->generation, 5);
  EXPECT_EQ(table->num_nodes(), 2);
}

TEST_F(Takeover, WhoLeavesBeforeConfirmingDoesNotCount) {
  {
    Connection connection = survivor();
    ASSERT_TRUE(hears(connection, "confirm", milliseconds(20'000)));
  }
  // One host of three is no majority.
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] {
    leader_.attend();
    return leader_.decision()->action == Decision::Action::end;
  }));
  EXPECT_FALSE(leader_.next_table());
}

}  // namespace
}  // namespace lockstep::launch::testing
