#include <gtest/gtest.h>

#include <lockstep/comm/transport/connect.h>
#include <lockstep/net/handshake.h>

namespace lockstep::comm {
namespace {

TEST(GroupId, ShortTextsAreTheirOwnId) { EXPECT_EQ(group_id_from("job/0/1.2"), "job/0/1.2"); }

TEST(GroupId, LongOnesFitAConnectionAndStayApart) {
  const std::string name(10'000, 'x');
  const std::string one = group_id_from(name + "/1.0");
  EXPECT_LT(one.size(), net::kLongestPurpose / 2);
  EXPECT_EQ(one, group_id_from(name + "/1.0"));
  EXPECT_NE(one, group_id_from(name + "/1.1"));
  EXPECT_NE(one, group_id_from("y" + name + "/1.0"));
}

TEST(GroupId, GroupsInGroupsStayShort) {
  std::string id = "job/0";
  for (int depth = 0; depth < 1000; ++depth) id = group_id_from(id + "/123.456");
  EXPECT_LT(id.size(), net::kLongestPurpose / 2);
}

}  // namespace
}  // namespace lockstep::comm
