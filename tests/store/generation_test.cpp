// A store belongs to one generation of its job: processes of another generation get nothing from
// it.
#include <lockstep/net/handshake.h>
#include <lockstep/net/socket.h>
#include <lockstep/store/protocol.h>

#include "fixture.h"

namespace lockstep::store {
namespace {

using testing::HasSubstr;

class Generation : public testing::Test {
 protected:
  std::unique_ptr<Client> client(std::uint32_t generation) {
    return std::make_unique<Client>(server_.address(), secret_, soon(), generation);
  }

  net::Secret secret_ = net::Secret::random();
  Server server_{{"127.0.0.1", 0}, secret_, kStoreCapacityBytes, 7};
};

TEST_F(Generation, ItsOwnGetIn) {
  client(7)->set("key", "value", soon());
  EXPECT_EQ(client(7)->get("key", soon()), "value");
}

TEST_F(Generation, OthersAreRefusedByName) {
  for (const std::uint32_t other : {0u, 6u, 8u}) {
    const auto [fault, text] = comm_error([&] { client(other); });
    EXPECT_EQ(fault, Fault::refused);
    EXPECT_THAT(text, HasSubstr("serves generation 7"));
    EXPECT_THAT(text, HasSubstr("this process is of generation " + std::to_string(other)));
  }
}

TEST_F(Generation, TheServerDoesNotRelyOnItsClientsToLeave) {
  for (const std::string& purpose :
       {purpose_of("stale", 6), std::string(kPurpose) + "stale/", std::string(kPurpose) + "a/7b"}) {
    const net::Fd socket = net::connect_tcp(server_.address(), soon());
    net::introduce(socket, secret_, purpose, soon());
    Greeting greeting;
    net::read_all(socket, greeting, soon());
    EXPECT_EQ(generation_in(greeting), 7u);
    net::write_all(socket, encode(Request{.op = Op::set, .keys = {"key"}, .value = "stale"}),
                   soon());
    std::array<std::byte, 1> reply;
    EXPECT_EQ(comm_error([&] { net::read_all(socket, reply, soon()); }).first, Fault::peer_lost);
  }
  EXPECT_EQ(client(7)->get("key", soon()), std::nullopt);
}

TEST_F(Generation, IsInThePurpose) {
  EXPECT_EQ(generation_in(purpose_of("name", 0)), 0u);
  EXPECT_EQ(generation_in(purpose_of("name", 4'000'000'000u)), 4'000'000'000u);
  EXPECT_EQ(generation_in("store name/4294967296"), std::nullopt);
}

}  // namespace
}  // namespace lockstep::store
