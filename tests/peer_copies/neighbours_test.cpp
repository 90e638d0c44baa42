// The choice of the rank that keeps another rank's copy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/recovery/peer_copies.h>

namespace lockstep {
namespace {

using Hosts = std::vector<std::string>;

// The number of copies that stay on their host. Every rank keeps one, of another rank.
int num_staying(const Hosts& hosts) {
  const std::vector<int> keeper = keepers(hosts);
  EXPECT_EQ(keeper.size(), hosts.size());
  std::vector<int> kept(hosts.size());
  int staying = 0;
  for (std::size_t rank = 0; rank < keeper.size(); ++rank) {
    EXPECT_NE(keeper[rank], static_cast<int>(rank));
    const auto at = static_cast<std::size_t>(keeper[rank]);
    ++kept.at(at);
    staying += hosts[rank] == hosts[at] ? 1 : 0;
  }
  EXPECT_THAT(kept, ::testing::Each(1));
  return staying;
}

TEST(Neighbours, AreTheNextRankOnOneHost) {
  EXPECT_EQ(keepers({"a", "a", "a"}), (std::vector{1, 2, 0}));
  EXPECT_EQ(keepers({"a"}), std::vector{0});
}

TEST(Neighbours, AreOnAnotherHostWhereThereIsOne) {
  EXPECT_EQ(num_staying({"a", "b"}), 0);
  EXPECT_EQ(num_staying({"a", "a", "b", "b"}), 0);
  EXPECT_EQ(num_staying({"b", "a", "b", "a", "c", "a"}), 0) << "in any order";
  EXPECT_EQ(num_staying({"a", "a", "a", "b", "b", "c"}), 0) << "half of the ranks on one";
  EXPECT_EQ(num_staying({"a", "b", "b", "c", "c", "c", "d"}), 0);
}

TEST(Neighbours, OfMoreThanHalfTheRanksAsFewAsCanBeStay) {
  EXPECT_EQ(num_staying({"a", "a", "a", "b"}), 2);
  EXPECT_EQ(num_staying({"a", "b", "a", "c", "a", "a"}), 2);
}

}  // namespace
}  // namespace lockstep
