// A rank whose connection is dropped by a busy listener tries again; a rank that finds no listener
// fails at once.
#include <gtest/gtest.h>

#include <lockstep/comm/transport/endpoint.h>
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>

#include "ranks.h"

namespace lockstep::comm::testing {
namespace {

// Hangs up on the first `dropped` connections in the middle of the greeting, and greets the next
// one.
class BusyListener {
 public:
  BusyListener(const net::Secret& secret, int dropped)
      : listener_(net::listen_tcp({"127.0.0.1", 0})), thread_([this, &secret, dropped] {
          try {
            for (int i = 0; i < dropped; ++i) {
              const net::Fd connection = next();
              std::vector<std::byte> hello(8);
              net::read_all(connection, hello, deadline_);
            }
            const net::Fd connection = next();
            purpose_ = net::welcome(connection, secret, deadline_);
          } catch (const std::exception& error) {
            purpose_ = error.what();
          }
        }) {}
  ~BusyListener() {
    if (thread_.joinable()) thread_.join();
  }

  EndpointAddress address() const {
    return {.host = "a", .unix_name = "b", .tcp = net::local_address(listener_), .cores = {}};
  }
  std::string purpose() {
    thread_.join();
    return purpose_;
  }

 private:
  net::Fd next() {
    while (!deadline_.passed()) {
      if (net::Fd connection = net::accept(listener_)) return connection;
      std::this_thread::sleep_for(milliseconds(1));
    }
    throw std::runtime_error("nobody came");
  }

  Deadline deadline_ = Deadline::after(milliseconds(20'000));
  net::Fd listener_;
  std::string purpose_;
  std::thread thread_;
};

TEST(Endpoint, ComesAgainWhereItIsDroppedWhileBeingGreeted) {
  const net::Secret secret = net::Secret::random();
  const Endpoint endpoint("127.0.0.1", secret);
  BusyListener listener(secret, 3);
  const net::Fd connection = endpoint.connect(listener.address(), "group", 2, Medium::tcp,
                                              Deadline::after(milliseconds(20'000)));
  EXPECT_TRUE(connection);
  EXPECT_EQ(listener.purpose(), "group 2 group");
}

TEST(Endpoint, SaysAtOnceThatNobodyListensAnyMore) {
  const net::Secret secret = net::Secret::random();
  const Endpoint endpoint("127.0.0.1", secret);
  EndpointAddress gone;
  {
    const Endpoint other("127.0.0.1", secret);
    gone = other.address();
  }
  for (const Medium medium : {Medium::tcp, Medium::shared_memory}) {
    const auto deadline = Deadline::after(milliseconds(60'000));
    try {
      endpoint.connect(gone, "group", 0, medium, deadline);
      FAIL() << "it connected to nobody";
    } catch (const CommError& error) {
      EXPECT_EQ(error.fault(), Fault::peer_lost) << error.what();
    }
    EXPECT_FALSE(deadline.passed());
  }
}

}  // namespace
}  // namespace lockstep::comm::testing
