#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <future>
#include <thread>
#include <vector>

#include <lockstep/net/socket.h>

#include "../base/errors.h"
#include "deadlines.h"

namespace lockstep::net {
namespace {

using testing::HasSubstr;

bool has_ipv6_loopback() {
  try {
    listen_tcp({"::1", 0});
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

std::vector<std::byte> pattern(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

Fd accept_one(const Fd& listener) {
  EXPECT_TRUE(wait_ready(listener.get(), POLLIN, soon()));
  return accept(listener);
}

TEST(Fd, ClosesOnceAndMoves) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  Fd reading(ends[0]);
  {
    Fd writing(ends[1]);
    Fd moved = std::move(writing);
    EXPECT_FALSE(writing);
    EXPECT_EQ(moved.get(), ends[1]);
    Fd kept(moved.release());
    moved = std::move(kept);
    EXPECT_TRUE(moved);
  }
  EXPECT_EQ(::fcntl(ends[1], F_GETFD), -1);
  EXPECT_NE(::fcntl(ends[0], F_GETFD), -1);
  reading.reset();
  EXPECT_EQ(::fcntl(ends[0], F_GETFD), -1);
}

TEST(Tcp, CarriesWholeBuffersBothWays) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    if (std::string(host) == "::1" && !has_ipv6_loopback()) continue;
    const Fd listener = listen_tcp({host, 0});
    EXPECT_FALSE(accept(listener));
    const Fd near = connect_tcp({host, local_port(listener)}, soon());
    const Fd far = accept_one(listener);
    const auto sent = pattern(5 << 20);
    std::vector<std::byte> received(sent.size());
    auto writing = std::async(std::launch::async, [&] { write_all(near, sent, soon()); });
    read_all(far, received, soon());
    writing.get();
    EXPECT_EQ(received, sent);
    write_all(far, std::span(sent).first(3), soon());
    read_all(near, std::span(received).first(3), soon());
  }
}

TEST(Tcp, SocketsAreNonBlockingAndClosedOnExec) {
  const Fd listener = listen_tcp({"127.0.0.1", 0});
  const Fd near = connect_tcp({"127.0.0.1", local_port(listener)}, soon());
  const Fd far = accept_one(listener);
  for (const Fd* socket : {&listener, &near, &far}) {
    EXPECT_NE(::fcntl(socket->get(), F_GETFL) & O_NONBLOCK, 0);
    EXPECT_NE(::fcntl(socket->get(), F_GETFD) & FD_CLOEXEC, 0);
  }
}

TEST(Tcp, APortInUseIsNamed) {
  const Fd first = listen_tcp({"127.0.0.1", 0});
  const int port = local_port(first);
  const auto error = usage_error([&] { listen_tcp({"127.0.0.1", port}); });
  EXPECT_THAT(error, HasSubstr("port " + std::to_string(port)));
  EXPECT_THAT(error, HasSubstr("in use"));
}

TEST(Tcp, AnAddressOfAnotherHostIsNamed) {
  EXPECT_THAT(usage_error([] {
                listen_tcp({"192.0.2.1", 0});
              }),
              HasSubstr("192.0.2.1 is not an address of this host"));
}

TEST(Tcp, ConnectWaitsForAListener) {
  const int port = local_port(listen_tcp({"127.0.0.1", 0}));
  auto connecting = std::async(std::launch::async, [&] {
    return connect_tcp({"127.0.0.1", port}, soon());
  });
  EXPECT_EQ(connecting.wait_for(milliseconds(50)), std::future_status::timeout);
  const Fd listener = listen_tcp({"127.0.0.1", port});
  EXPECT_TRUE(connecting.get());
}

TEST(Tcp, ConnectToNobodyTimesOutAndNamesTheAddress) {
  const int port = local_port(listen_tcp({"127.0.0.1", 0}));
  const auto start = Clock::now();
  const auto [fault, text] = comm_error([&] { connect_tcp({"127.0.0.1", port}, in(100)); });
  EXPECT_GE(Clock::now() - start, milliseconds(100));
  EXPECT_EQ(fault, Fault::timeout);
  EXPECT_THAT(text, HasSubstr("127.0.0.1:" + std::to_string(port)));
  EXPECT_THAT(text, HasSubstr("refused"));
}

TEST(Tcp, ConnectGivesUpAtOnceWhereTold) {
  const int port = local_port(listen_tcp({"127.0.0.1", 0}));
  const auto [fault, text] = comm_error([&] {
    connect_tcp({"127.0.0.1", port}, Deadline::after(std::chrono::hours(1)), IfRefused::give_up);
  });
  EXPECT_EQ(fault, Fault::peer_lost);
  EXPECT_THAT(text, HasSubstr("Nobody listens there"));
}

TEST(Tcp, ConnectToAnUnknownNameIsTheCallersMistake) {
  EXPECT_THAT(usage_error([] {
                connect_tcp({"no-such-host.invalid", 1}, soon());
              }),
              HasSubstr("no-such-host.invalid"));
}

TEST(Stream, ReadsAndWritesEndAtTheirDeadline) {
  const auto [near, far] = socket_pair();
  std::array<std::byte, 4> bytes{};
  write_all(far, std::span(bytes).first(3), soon());
  EXPECT_EQ(comm_error([&near = near, &bytes] { read_all(near, bytes, in(50)); }).first,
            Fault::timeout);
  const std::vector<std::byte> flood(16 << 20);
  EXPECT_EQ(comm_error([&near = near, &flood] { write_all(near, flood, in(50)); }).first,
            Fault::timeout);
}

TEST(Stream, ReadsAndWritesNoticeThatThePeerIsGone) {
  auto [near, far] = socket_pair();
  std::array<std::byte, 4> bytes{};
  write_all(far, std::span(bytes).first(3), soon());
  far.reset();
  EXPECT_EQ(comm_error([&near = near, &bytes] { read_all(near, bytes, soon()); }).first,
            Fault::peer_lost);
  EXPECT_EQ(comm_error([&near = near, &bytes] { write_all(near, bytes, soon()); }).first,
            Fault::peer_lost);
}

TEST(Stream, NothingIsAlwaysThere) {
  auto [near, far] = socket_pair();
  far.reset();
  read_all(near, {}, in(0));
  write_all(near, {}, in(0));
}

TEST(Unix, AbstractNamesConnect) {
  const std::string name = "lockstep-test-" + std::to_string(::getpid());
  const Fd listener = listen_unix(name);
  EXPECT_THAT(usage_error([&] { listen_unix(name); }), HasSubstr(name));
  const Fd near = connect_unix(name, soon());
  const Fd far = accept_one(listener);
  const auto sent = pattern(1000);
  std::vector<std::byte> received(sent.size());
  write_all(near, sent, soon());
  read_all(far, received, soon());
  EXPECT_EQ(received, sent);
}

TEST(Unix, NobodyThereIsPeerLost) {
  EXPECT_EQ(comm_error([] { connect_unix("lockstep-test-nobody", soon()); }).first,
            Fault::peer_lost);
}

TEST(Unix, AFullQueueIsATimeout) {
  const std::string name = "lockstep-test-full-" + std::to_string(::getpid());
  const Fd listener = listen_unix(name, 0);
  std::vector<Fd> queued;
  const auto [fault, text] = comm_error([&] {
    while (queued.size() < 100) queued.push_back(connect_unix(name, in(50)));
  });
  EXPECT_EQ(fault, Fault::timeout);
}

TEST(Descriptors, ArriveOpenAndTheSame) {
  const auto [near, far] = socket_pair();
  int pipes[2][2];
  for (auto& ends : pipes) ASSERT_EQ(::pipe(ends), 0);
  send_descriptors(near, {pipes[0][1], pipes[1][1]}, soon());
  for (auto& ends : pipes) ::close(ends[1]);
  auto received = receive_descriptors(far, 2, soon());
  ASSERT_EQ(received.size(), 2u);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_NE(::fcntl(received[i].get(), F_GETFD) & FD_CLOEXEC, 0);
    const char sent = static_cast<char>('a' + i);
    ASSERT_EQ(::write(received[i].get(), &sent, 1), 1);
    received[i].reset();
    char got = 0;
    EXPECT_EQ(::read(pipes[i][0], &got, 1), 1);
    EXPECT_EQ(got, sent);
    EXPECT_EQ(::read(pipes[i][0], &got, 1), 0) << "a copy is still open";
    ::close(pipes[i][0]);
  }
}

TEST(Descriptors, AWrongNumberIsAnErrorAndLeaksNothing) {
  for (const auto& [sent, wanted] : {std::pair{1, 2}, std::pair{3, 1}, std::pair{2, 0}}) {
    const auto [near, far] = socket_pair();
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    send_descriptors(near, std::vector<int>(static_cast<std::size_t>(sent), ends[1]), soon());
    ::close(ends[1]);
    const auto [fault, text] = comm_error([&far = far, wanted = wanted] {
      receive_descriptors(far, static_cast<std::size_t>(wanted), soon());
    });
    EXPECT_EQ(fault, Fault::corrupted);
    char got = 0;
    EXPECT_EQ(::read(ends[0], &got, 1), 0) << "a copy is still open";
    ::close(ends[0]);
  }
}

TEST(Descriptors, APlainByteCarriesNone) {
  const auto [near, far] = socket_pair();
  const std::byte byte{};
  write_all(near, std::span(&byte, 1), soon());
  EXPECT_EQ(comm_error([&far = far] { receive_descriptors(far, 1, soon()); }).first,
            Fault::corrupted);
  EXPECT_EQ(comm_error([&far = far] { receive_descriptors(far, 1, in(50)); }).first,
            Fault::timeout);
}

TEST(Descriptors, APeerThatIsGoneIsNoticed) {
  auto [near, far] = socket_pair();
  near.reset();
  EXPECT_EQ(comm_error([&far = far] { receive_descriptors(far, 1, soon()); }).first,
            Fault::peer_lost);
  EXPECT_EQ(comm_error([&far = far] { send_descriptors(far, {0}, soon()); }).first,
            Fault::peer_lost);
}

}  // namespace
}  // namespace lockstep::net
