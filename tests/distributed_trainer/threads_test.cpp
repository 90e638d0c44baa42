// The number of threads that a rank computes with.
#include <gtest/gtest.h>

#include <lockstep/train/job_config.h>

namespace lockstep::train {
namespace {

TEST(Threads, RanksThatAreNotBoundDivideTheCores) {
  EXPECT_EQ(share_of_cores(std::vector<double>(16, 2), 16, 2), 8);
  EXPECT_EQ(share_of_cores(std::vector<double>(16, 3), 16, 3), 5);
  EXPECT_EQ(share_of_cores(std::vector<double>(3, 3), 3, 3), 1);
  EXPECT_EQ(share_of_cores(std::vector<double>(2, 8), 2, 8), 1) << "never none";
}

TEST(Threads, RanksThatAreBoundHaveTheirCoresAlone) {
  EXPECT_EQ(share_of_cores(std::vector<double>(8, 1), 8, 2), 8);
  EXPECT_EQ(share_of_cores({1, 1, 2, 2}, 4, 2), 3) << "two of them shared";
}

TEST(Threads, TheContainersLimitIsDividedToo) {
  EXPECT_EQ(share_of_cores(std::vector<double>(64, 2), 4, 2), 2);
  EXPECT_EQ(share_of_cores({}, 6, 2), 3) << "cores that the kernel does not list";
}

}  // namespace
}  // namespace lockstep::train
