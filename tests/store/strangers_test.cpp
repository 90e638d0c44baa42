// Processes that do not know the secret do not get in, and do not keep out those that do.
#include <sys/resource.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <future>
#include <random>
#include <thread>

#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/protocol.h>

#include "fixture.h"
#include "proxy.h"

namespace lockstep::store {
namespace {

using testing::HasSubstr;

class Strangers : public StoreTest {
 protected:
  net::Fd stranger() const { return net::connect_tcp(server_->address(), soon()); }

  // A connection that has proven itself and read its greeting, for requests that the Client would
  // not send.
  net::Fd insider() const {
    net::Fd socket = stranger();
    net::introduce(socket, secret_, kPurpose + std::string("insider"), soon());
    Greeting greeting;
    net::read_all(socket, greeting, soon());
    return socket;
  }

  void expect_served() const {
    const auto store = client();
    const auto count = store->add("served", 1, soon());
    EXPECT_EQ(store->get("served", soon()), std::to_string(count));
  }
};

// Reads to the end; true if the server hung up. `received` gets the number of bytes before that.
bool hung_up(const net::Fd& socket, const Deadline& deadline, std::size_t* received = nullptr) {
  std::array<std::byte, 4096> bytes;
  while (net::wait_ready(socket.get(), POLLIN, deadline)) {
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
    if (got > 0 && received != nullptr) *received += static_cast<std::size_t>(got);
  }
  return false;
}

// The server may hang up in the middle of it.
void try_to_send(const net::Fd& socket, std::span<const std::byte> bytes) {
  try {
    net::write_all(socket, bytes, soon());
  } catch (const CommError&) {
  }
}

std::vector<std::byte> noise(std::mt19937& random, std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::vector<std::byte> hello(std::uint32_t purpose_bytes, std::uint32_t reserved = 0) {
  std::vector<std::byte> bytes(32);
  std::memcpy(bytes.data(), "LOCKSTP1", 8);
  std::memcpy(bytes.data() + 8, &purpose_bytes, 4);
  std::memcpy(bytes.data() + 12, &reserved, 4);
  return bytes;
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

TEST_F(Strangers, AWrongSecretIsRefusedAndChangesNothing) {
  const auto store = client();
  store->set("a", "1", soon());
  const auto [fault, text] = comm_error([&] {
    Client intruder(server_->address(), net::Secret::random(), soon());
    intruder.set("a", "2", soon());
  });
  EXPECT_EQ(fault, Fault::refused);
  EXPECT_THAT(text, HasSubstr("secret"));
  EXPECT_EQ(store->get("a", soon()), "1");
}

TEST_F(Strangers, ARecordedConversationIsRefused) {
  Proxy proxy(server_->address());
  {
    Client genuine(proxy.address(), secret_, soon());
    EXPECT_EQ(genuine.add("n", 1, soon()), 1);
  }
  const auto recorded = proxy.recorded();
  ASSERT_GT(recorded.size(), 32u + 32u);
  const net::Fd thief = stranger();
  try_to_send(thief, recorded);
  std::size_t received = 0;
  EXPECT_TRUE(hung_up(thief, soon(), &received));
  EXPECT_LE(received, 48u) << "more than a challenge";
  EXPECT_EQ(client()->get("n", soon()), "1");
}

TEST_F(Strangers, TheServersOwnProofDoesNotOpenIt) {
  const net::Fd mirror = stranger();
  const std::string purpose = kPurpose + std::string("mirror");
  net::write_all(mirror, hello(static_cast<std::uint32_t>(purpose.size())), soon());
  net::write_all(mirror, std::as_bytes(std::span(purpose)), soon());
  std::array<std::byte, 48> challenge;
  net::read_all(mirror, challenge, soon());
  net::write_all(mirror, std::span(challenge).subspan(16), soon());
  std::size_t received = 0;
  EXPECT_TRUE(hung_up(mirror, soon(), &received));
  EXPECT_EQ(received, 0u);
}

TEST_F(Strangers, MembersWhoWantSomethingElseAreTurnedAway) {
  const net::Fd lost = stranger();
  try {
    net::introduce(lost, secret_, "link 3", soon());
  } catch (const CommError&) {
  }
  EXPECT_TRUE(hung_up(lost, soon()));
  expect_served();
}

TEST_F(Strangers, NoiseIsHungUpOn) {
  std::mt19937 random(1);
  for (const std::size_t size : {32, 33, 100, 5000, 1 << 20}) {
    const net::Fd socket = stranger();
    try_to_send(socket, noise(random, size));
    EXPECT_TRUE(hung_up(socket, soon())) << size;
  }
  expect_served();
}

TEST_F(Strangers, OversizedHellosAreHungUpOn) {
  for (const std::uint32_t size : {513u, 1u << 20, 0xffffffffu}) {
    const net::Fd socket = stranger();
    try_to_send(socket, hello(size));
    EXPECT_TRUE(hung_up(socket, soon())) << size;
  }
  const net::Fd reserved = stranger();
  try_to_send(reserved, hello(0, 1));
  EXPECT_TRUE(hung_up(reserved, soon()));
  expect_served();
}

TEST_F(Strangers, OversizedRequestsAreHungUpOn) {
  for (const std::uint32_t size : {static_cast<std::uint32_t>(kLongestRequest) + 1, 0xffffffffu}) {
    const net::Fd socket = insider();
    net::write_all(socket, std::as_bytes(std::span(&size, 1)), soon());
    EXPECT_TRUE(hung_up(socket, soon())) << size;
  }
  expect_served();
}

TEST_F(Strangers, BrokenRequestsAreHungUpOn) {
  std::mt19937 random(2);
  for (int i = 0; i < 50; ++i) {
    const net::Fd socket = insider();
    auto bytes = noise(random, 1 + random() % 60);
    const auto size = static_cast<std::uint32_t>(bytes.size());
    bytes.insert(bytes.begin(), 4, std::byte{});
    std::memcpy(bytes.data(), &size, 4);
    try_to_send(socket, bytes);
    EXPECT_TRUE(hung_up(socket, soon()));
  }
  expect_served();
}

TEST_F(Strangers, ASecondRequestBeforeTheAnswerIsHungUpOn) {
  const net::Fd socket = insider();
  auto bytes =
      encode(Request{.op = Op::wait, .number = 1, .keys = {"never"}, .patience_ms = 60000});
  net::write_all(socket, bytes, soon());
  net::write_all(socket, bytes, soon());
  EXPECT_TRUE(hung_up(socket, soon()));
  expect_served();
}

TEST_F(Strangers, HalfHandshakesAreDroppedInAFewSeconds) {
  std::vector<net::Fd> half;
  half.push_back(stranger());  // sends nothing at all
  half.push_back(stranger());
  const auto whole = hello(10);
  net::write_all(half.back(), std::span(whole).first(7), soon());
  half.push_back(stranger());
  net::write_all(half.back(), hello(10), soon());
  half.push_back(stranger());  // gets the challenge, and then stays silent
  net::write_all(half.back(), hello(0), soon());
  expect_served();
  const auto store = client();
  std::this_thread::sleep_for(milliseconds(500));
  for (const net::Fd& socket : half) EXPECT_TRUE(hung_up(socket, soon()));
  // A proven connection may be silent for as long as it likes.
  EXPECT_EQ(store->get("a", soon()), std::nullopt);
}

TEST_F(Strangers, AnInsiderInTheMiddleOfARequestMayTakeItsTime) {
  const net::Fd slow = insider();
  const auto bytes = encode(Request{.op = Op::set, .number = 1, .keys = {"slow"}, .value = "1"});
  for (const std::byte& byte : bytes) {
    net::write_all(slow, std::span(&byte, 1), soon());
    std::this_thread::sleep_for(milliseconds(1));
  }
  expect_served();
  EXPECT_EQ(client()->wait({"slow"}, soon()).front(), "1");
}

TEST_F(Strangers, ThousandsOfThemKeepNobodyOut) {
  constexpr std::size_t kMany = 2500;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  limit.rlim_cur = limit.rlim_max;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  ASSERT_GT(limit.rlim_max, kMany + 500) << "this test needs a higher 'ulimit -Hn'";
  const auto store = client();
  const std::size_t before = open_descriptors();

  std::atomic<bool> flooding = true;
  std::thread working([&] {
    while (flooding) store->add("worked", 1, soon());
  });
  std::mt19937 random(3);
  std::vector<net::Fd> crowd;
  for (std::size_t i = 0; i < kMany; ++i) {
    crowd.push_back(stranger());
    if (i % 3 == 1) try_to_send(crowd.back(), noise(random, 200));
    if (i % 3 == 2) try_to_send(crowd.back(), hello(0));
    if (i % 250 == 0) expect_served();
  }
  flooding = false;
  working.join();
  EXPECT_GT(std::stoi(*store->get("worked", soon())), 0);
  for (int i = 0; i < 20; ++i) expect_served();
  // The cost is bounded: the server keeps no more than a few hundred of them.
  EXPECT_LT(open_descriptors(), before + kMany + 256 + 32);
}

TEST_F(Strangers, AnUnendingFloodKeepsNobodyOut) {
  std::atomic<bool> flooding = true;
  std::vector<std::future<int>> floods;
  for (int t = 0; t < 2; ++t)
    floods.push_back(std::async(std::launch::async, [&] {
      std::vector<net::Fd> held;
      int count = 0;
      for (; flooding; ++count) {
        net::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        const auto to = net::resolve(server_->address()).front();
        ::connect(socket.get(), to.get(), to.length);
        held.push_back(std::move(socket));
        if (held.size() > 300) held.erase(held.begin(), held.begin() + 100);
        if (count % 50 == 0) std::this_thread::sleep_for(milliseconds(10));
      }
      return count;
    }));
  const auto until = Deadline::after(milliseconds(1500));
  for (int i = 0; i < 5 || !until.passed(); ++i) expect_served();
  flooding = false;
  for (auto& flood : floods) EXPECT_GT(flood.get(), 500);
  expect_served();
}

TEST_F(Strangers, NothingIsLeftOpen) {
  server_.reset();
  const std::size_t before = open_descriptors();
  {
    const Server server({"127.0.0.1", 0}, secret_);
    Client store(server.address(), secret_, soon());
    store.set("a", "1", soon());
    const net::Fd silent = net::connect_tcp(server.address(), soon());
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST_F(Strangers, ListensOnlyWhereItWasTold) {
  const int port = server_->address().port;
  for (const char* host : {"127.0.0.2", "127.1.2.3"}) {
    const auto [fault, text] = comm_error([&] {
      net::connect_tcp({host, port}, soon(), net::IfRefused::give_up);
    });
    EXPECT_EQ(fault, Fault::peer_lost) << host;
  }
  // The other address is one of this host's, so a server can listen there.
  const Server other({"127.0.0.2", port}, secret_);
  EXPECT_EQ(other.address().host, "127.0.0.2");
  client()->set("a", "1", soon());
  EXPECT_EQ(Client(other.address(), secret_, soon()).get("a", soon()), std::nullopt);
}

TEST_F(Strangers, APortInUseIsNamed) {
  const auto text = usage_error([&] { Server(server_->address(), secret_); });
  EXPECT_THAT(text, HasSubstr("port " + std::to_string(server_->address().port)));
  EXPECT_THAT(text, HasSubstr("in use"));
}

TEST_F(Strangers, AnAddressOfAnotherHostIsNamed) {
  EXPECT_THAT(usage_error([&] { Server({"192.0.2.1", 0}, secret_); }), HasSubstr("192.0.2.1"));
  EXPECT_THAT(usage_error([&] {
                Server({"no-such-host.invalid", 0}, secret_);
              }),
              HasSubstr("no-such-host.invalid"));
}

}  // namespace
}  // namespace lockstep::store
