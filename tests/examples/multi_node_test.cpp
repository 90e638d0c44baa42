// A program that starts itself on several hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/net/socket.h>

#include "one_thread.h"

namespace lockstep::examples {
namespace {

using ::testing::HasSubstr;

std::string last_loss(const std::string& output) {
  const auto at = output.rfind("step 40: loss ");
  return at == std::string::npos ? "" : output.substr(at + 14, 8);
}

TEST(MultiNode, TrainsOnOneHostAsOnTwo) {
  // The host runs as many ranks as it is told to.
  const std::vector<std::string> variables = {kOneThread.front(), "CUDA_VISIBLE_DEVICES="};
  Launched one({MULTI_NODE}, variables);
  ASSERT_EQ(one.wait(), 0) << one.error();
  EXPECT_THAT(one.output(), HasSubstr("1 host of 2 ranks; 2 restarts"));
  EXPECT_LT(std::atof(last_loss(one.output()).c_str()), 0.1) << one.output();

  const launch::testing::Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string endpoint = "127.0.0.1:" + std::to_string(net::free_port("127.0.0.1"));
  const auto start = [&] { return Launched({MULTI_NODE, "2", "1", endpoint, secret}, variables); };
  Launched first = start();
  Launched second = start();
  EXPECT_EQ(first.wait(), 0) << first.error();
  EXPECT_EQ(second.wait(), 0) << second.error();
  const std::string said = first.output() + second.output();
  EXPECT_THAT(said, HasSubstr("1 to 2 hosts of 1 rank each, which meet at " + endpoint));
  EXPECT_EQ(last_loss(said), last_loss(one.output())) << said;
  EXPECT_EQ(launch::testing::count_of("step 40", said), 1) << "one rank of all tells";
}

}  // namespace
}  // namespace lockstep::examples
