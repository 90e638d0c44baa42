// One TCP link between two ranks of this process, in situations that a whole job meets once in a
// thousand runs.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include <gtest/gtest.h>

#include <lockstep/comm/transport/tcp_link.h>

#include "ranks.h"
#include "scarcity.h"

namespace lockstep::comm::testing {
namespace {

constexpr milliseconds kLong(10'000);
// Longer than a link waits between two attempts at a repair.
constexpr milliseconds kRepairPause(60);

template <typename Ready>
bool wait_for(Ready ready) {
  const Deadline deadline = Deadline::after(kLong);
  while (!ready()) {
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

class TcpLinks : public ::testing::Test {
 protected:
  TcpLinks() {
    const Deadline deadline = Deadline::after(kLong);
    for (const auto& endpoint : endpoints_) mailboxes_.push_back(endpoint->open(kGroup));
    connections_[1] =
        endpoints_[1]->connect(endpoints_[0]->address(), kGroup, 1, Medium::tcp, deadline);
    connections_[0] = mailboxes_[0]->take(1, deadline);
  }

  // Makes one rank's link to the other, whose address is `address`.
  std::unique_ptr<TcpLink> link(std::size_t rank, EndpointAddress address) {
    return std::make_unique<TcpLink>(
        static_cast<int>(rank), static_cast<int>(1 - rank), std::move(connections_[rank]),
        TcpPeer{endpoints_[rank], mailboxes_[rank], std::move(address), kGroup},
        std::make_shared<SpareFrames>());
  }
  std::unique_ptr<TcpLink> link(std::size_t rank) {
    return link(rank, endpoints_[1 - rank]->address());
  }

  // Cuts the connection below a link, and lets the link notice it.
  static void cut(TcpLink& link) {
    ::shutdown(link.descriptor(), SHUT_RDWR);
    ASSERT_TRUE(wait_for([&] {
      link.progress();
      return link.state() == PeerState::broken;
    }));
  }

  // Does to a link what the end of a process does: no destructor runs, and the kernel closes the
  // socket.
  static void end_process(TcpLink& link) {
    const net::Fd nothing(::open("/dev/null", O_RDWR | O_CLOEXEC));
    ::dup2(nothing.get(), link.descriptor());
  }

  static constexpr const char* kGroup = "links";
  std::vector<std::shared_ptr<Endpoint>> endpoints_ = make_endpoints(2, net::Secret::random());
  std::vector<std::shared_ptr<Mailbox>> mailboxes_;
  net::Fd connections_[2];
  const Fingerprint call_{.sequence = 1};
};

TEST_F(TcpLinks, ARepairThatRunsOutOfMemoryIsTriedAgain) {
  const auto left = link(0);
  const auto right = link(1);
  cut(*right);
  int failures = 0;
  for (int allowed = 0; right->state() == PeerState::broken; ++allowed) {
    ASSERT_LT(allowed, 200) << "the repair never succeeds";
    std::this_thread::sleep_for(kRepairPause);
    const Deadline deadline = Deadline::after(kLong);
    EXPECT_NO_THROW({
      const Scarcity scarcity(allowed);
      right->repair(deadline);
      failures += Scarcity::felt() ? 1 : 0;
    });
  }
  EXPECT_GT(failures, 3) << "hardly an allocation has failed";
  EXPECT_EQ(right->state(), PeerState::alive);

  std::vector<std::byte> sent(1000, std::byte{7});
  std::vector<std::byte> received(sent.size());
  right->post_send(call_, sent);
  left->post_receive(call_, received);
  EXPECT_TRUE(wait_for([&] {
    left->take_connection();
    left->progress();
    right->progress();
    return left->idle() && right->idle();
  }));
  EXPECT_EQ(received, sent);
}

TEST_F(TcpLinks, ANameThatDoesNotResolveForTheMomentBreaksNothing) {
  EndpointAddress nowhere = endpoints_[0]->address();
  nowhere.tcp.host = "no-such-host.invalid";
  const auto right = link(1, nowhere);
  cut(*right);
  EXPECT_NO_THROW(right->repair(Deadline::after(kLong)));
  EXPECT_EQ(right->state(), PeerState::broken);
}

TEST_F(TcpLinks, WhereTheConnectionBreaksTheEndpointSaysWhy) {
  const auto right = link(1);
  cut(*right);
  endpoints_[0]->close(kGroup, {.fault = Fault::mismatch, .explanation = "told by the endpoint"});
  right->repair(Deadline::after(kLong));
  EXPECT_EQ(right->state(), PeerState::aborted);
  EXPECT_EQ(right->notice().explanation, "told by the endpoint");
}

TEST_F(TcpLinks, WhereNobodyListensAnyMoreTheProcessIsDead) {
  const auto right = link(1);
  cut(*right);
  endpoints_[0].reset();
  right->repair(Deadline::after(kLong));
  EXPECT_EQ(right->state(), PeerState::dead);
}

// The notice is behind bytes that the peer has yet to read, bytes of the peer are unread here, and
// the process ends: the kernel resets the connection, which must not lose the notice.
TEST_F(TcpLinks, ANoticeOutlivesTheProcessThatSentIt) {
  const int small = 64 << 10;
  ::setsockopt(connections_[1].get(), SOL_SOCKET, SO_RCVBUF, &small, sizeof(small));
  const auto left = link(0);
  const auto right = link(1);
  const std::vector<std::byte> sent(512 << 10);
  std::vector<std::byte> received(sent.size());
  left->post_send(call_, sent);
  right->post_send(call_, sent);
  ASSERT_TRUE(wait_for([&] {
    left->progress();
    right->progress();
    return right->sends_done();
  }));

  std::thread reader([&] {
    right->post_receive(call_, received);
    EXPECT_TRUE(wait_for([&] {
      right->progress();
      return right->state() != PeerState::alive;
    }));
  });
  left->abandon_call();
  left->send_notice({.fault = Fault::peer_lost, .ranks = {2}, .explanation = "rank 2 is gone"});
  left->finish_notice(Deadline::after(kLong));
  end_process(*left);
  reader.join();
  EXPECT_EQ(right->state(), PeerState::aborted);
  EXPECT_EQ(right->notice().ranks, std::vector<int>{2});
  EXPECT_EQ(right->notice().explanation, "rank 2 is gone");
}

// A connection that broke just before a rank leaves is made again, because the peer needs the
// messages.
TEST_F(TcpLinks, LeavingWaitsForWhatIsNotOutYet) {
  const auto left = link(0);
  const auto right = link(1);
  cut(*right);
  ASSERT_TRUE(wait_for([&] {
    left->progress();
    return left->state() == PeerState::broken;
  }));
  const std::vector<std::byte> sent(100, std::byte{3});
  left->post_send(call_, sent);
  std::thread leaving([&] { left->send_goodbye(Deadline::after(kLong)); });
  std::vector<std::byte> received(sent.size());
  right->post_receive(call_, received);
  EXPECT_TRUE(wait_for([&] {
    if (right->state() == PeerState::broken) right->repair(Deadline::after(kLong));
    right->progress();
    return right->receives_done();
  }));
  leaving.join();
  EXPECT_EQ(received, sent);
}

// The acknowledgement of a peer's last messages finds nobody there; no call depends on it.
TEST_F(TcpLinks, APeerThatHasLeftIsOwedNothing) {
  auto left = link(0);
  const auto right = link(1);
  constexpr int kMessages = 100;
  const std::vector<std::byte> sent(100, std::byte{3});
  for (int message = 0; message < kMessages; ++message) left->post_send(call_, sent);
  right->progress();
  left->send_goodbye(Deadline::after(kLong));
  left.reset();
  for (int message = 0; message < kMessages; ++message) {
    std::vector<std::byte> received(sent.size());
    right->post_receive(call_, received);
    ASSERT_TRUE(right->receives_done()) << "message " << message;
    EXPECT_EQ(received, sent);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  EXPECT_TRUE(right->idle());
  right->progress();
  EXPECT_EQ(right->state(), PeerState::closed);
}

}  // namespace
}  // namespace lockstep::comm::testing
