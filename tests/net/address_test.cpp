#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/net/address.h>

#include "../base/errors.h"

namespace lockstep::net {
namespace {

using testing::HasSubstr;

struct Parsed {
  const char* text;
  const char* host;
  int port;
};

class AddressParse : public testing::TestWithParam<Parsed> {};

TEST_P(AddressParse, FindsHostAndPort) {
  const auto address = Address::parse(GetParam().text, 29400, "--rdzv-endpoint");
  EXPECT_EQ(address.host, GetParam().host);
  EXPECT_EQ(address.port, GetParam().port);
}

INSTANTIATE_TEST_SUITE_P(All, AddressParse,
                         testing::Values(Parsed{"host", "host", 29400}, Parsed{"host:1", "host", 1},
                                         Parsed{"10.0.0.1:65535", "10.0.0.1", 65535},
                                         Parsed{"host:0", "host", 0},
                                         Parsed{"host:", "host", 29400},
                                         Parsed{"[::1]:80", "::1", 80},
                                         Parsed{"[::1]", "::1", 29400}, Parsed{"::1", "::1", 29400},
                                         Parsed{"fe80::1:2", "fe80::1:2", 29400}));

TEST(Address, BadTextsNameTheirSource) {
  for (const char* text : {"", ":80", "host:65536", "host:-1", "host:http", "host:80x",
                           "host:99999999999", "[::1", "[::1]80", "[]:80"}) {
    const auto error = usage_error([&] { Address::parse(text, 0, "--rdzv-endpoint"); });
    EXPECT_THAT(error, HasSubstr("--rdzv-endpoint")) << text;
  }
  EXPECT_THAT(usage_error([] { Address::parse("host:70000", 0, "x"); }), HasSubstr("'70000'"));
}

TEST(Address, TextCanBeReadBack) {
  for (const char* text : {"host:1", "10.0.0.1:80", "[::1]:80"})
    EXPECT_EQ(Address::parse(text, 0, "x").text(), text);
}

TEST(Resolve, NumericAddressesAndNames) {
  EXPECT_EQ(resolve({"127.0.0.1", 80}).front().address().text(), "127.0.0.1:80");
  EXPECT_EQ(resolve({"::1", 80}).front().address().text(), "[::1]:80");
  EXPECT_FALSE(resolve({"localhost", 80}).empty());
}

TEST(Resolve, AnUnknownNameIsNamed) {
  const auto error = usage_error([] { resolve({"no-such-host.invalid", 80}); });
  EXPECT_THAT(error, HasSubstr("'no-such-host.invalid' does not resolve"));
}

TEST(LocalHost, IsTheAddressThatFacesThePeer) {
  EXPECT_EQ(local_host_toward({"127.0.0.1", 80}), "127.0.0.1");
  EXPECT_EQ(local_host_toward({"127.0.0.1", 0}), "127.0.0.1");
}

}  // namespace
}  // namespace lockstep::net
