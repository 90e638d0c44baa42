// Copies of a job's state in the memory of its processes.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>
#include <tests/base/files.h>
#include <tests/launch/launched.h>
#include <tests/ranks/job.h>

#include "held_parts.h"
#include "tables.h"

namespace lockstep::peer_copies {
namespace {

TEST(PeerCopies, AreRestoredWhateverRanksAreLost) {
  ranks::expect_cells_pass(4, {"--copies", "auto"});
}

TEST(PeerCopies, TravelWithAnEngineToo) {
  if (!std::ranges::count(comm::available_backends(), "gloo"))
    GTEST_SKIP() << "this build has no gloo";
  ranks::expect_cells_pass(4, {"--copies", "gloo", "rank 2 lost"});
}

TEST(PeerCopies, AreRestoredInAnyLayout) {
  const testing::TemporaryFolder folder;
  ranks::expect_cells_pass(4, {"--layouts", folder.path().string()});
}

// There are four processes, and the one that is lost prints nothing more.
void expect_three_go_on(const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"--standalone", "--nproc-per-node", "4",
                                    std::filesystem::read_symlink("/proc/self/exe").string()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const testing::TemporaryFolder dumps;  // the dumps of the calls that fail
  auto job =
      launch::testing::Launched::run(words, {"LOCKSTEP_FLIGHT_DIR=" + dumps.path().string()});
  EXPECT_EQ(job.wait(milliseconds(100'000)), 0) << job.error();
  EXPECT_EQ(launch::testing::count_of("1 cells, 0 failures", job.output()), 3) << job.output();
}

TEST(PeerCopies, ACopyThatIsNotCompleteLeavesTheOneBefore) {
  expect_three_go_on({"--lost-copying"});
}

TEST(PeerCopies, AProcessMayEndAtAnyMomentOfSendingOne) {
  for (const char* delay : {"0", "8", "30"}) expect_three_go_on({"--lost-sending", delay});
}

TEST(PeerCopies, OfOneRankAreItsOwn) {
  const RankMessages rank(setup_distributed().world());
  PeerCopies copies;
  EXPECT_EQ(copies.newest_step(rank), std::nullopt);
  for (const int step : {1, 2, 3}) copies.take(rank, contents_of(0, 1, step));
  EXPECT_EQ(copies.bytes_sent(), 0);
  const auto tensors = parts_of(0, 1, 3, Values::none);
  const auto wanted = parts_of(0, 1, 3, Values::of_step);
  const auto state = copies.restore(RankMessages(setup_distributed().world()), tensors);
  ASSERT_TRUE(state);
  EXPECT_EQ(state->step, 3);
  for (std::size_t i = 0; i < tensors.size(); ++i)
    EXPECT_TRUE(at::equal(tensors[i].values, wanted[i].values)) << tensors[i].name;
}

}  // namespace
}  // namespace lockstep::peer_copies
