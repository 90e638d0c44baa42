// Finding the usable cores, and dividing them among ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <filesystem>

#include <lockstep/launch/processes/rank_setup.h>

#include <lockstep/device/host/host.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Cores, SharesAreEqualAndApart) {
  const std::vector<int> cpus = {0, 4, 1, 5, 2, 6, 3};
  EXPECT_THAT(core_shares(cpus, 7, 3, 2),
              ElementsAre(ElementsAre(0, 4), ElementsAre(1, 5), ElementsAre(2, 6)));
  EXPECT_THAT(core_shares(cpus, 7, 2, 1), ElementsAre(ElementsAre(0, 4, 1), ElementsAre(5, 2, 6)));
  EXPECT_TRUE(core_shares(cpus, 7, 4, 2).empty()) << "more threads than cores";
  EXPECT_TRUE(core_shares(cpus, 3, 4, 1).empty()) << "more ranks than the quota allows";
  EXPECT_TRUE(core_shares(cpus, 7, 1, 1).empty()) << "a single rank has all of them";
}

TEST(Cores, AreThoseThisProcessMayUse) {
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  auto cpus = allowed_cpus();
  EXPECT_EQ(static_cast<int>(cpus.size()), CPU_COUNT(&set));
  for (const int cpu : cpus) EXPECT_TRUE(CPU_ISSET(cpu, &set));
}

TEST(Cores, RanksArePinnedUnlessToldOtherwise) {
  const auto cpus = allowed_cpus();
  if (cpus.size() < 2 || device::Host().num_usable_cores() < 2)
    GTEST_SKIP() << "pinning two ranks needs two cores";
  const std::vector<std::string> show = {"sh", "-c", "grep Cpus_allowed_list /proc/self/status"};
  std::vector<std::string> arguments = {"--nproc-per-node", "2"};
  arguments.insert(arguments.end(), show.begin(), show.end());
  Launched pinned = Launched::run(arguments, {"OMP_NUM_THREADS=1"});
  ASSERT_EQ(pinned.wait(), 0);
  auto lines = lines_of(pinned.output());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].substr(4), lines[1].substr(4)) << pinned.output();
  arguments.insert(arguments.begin(), {"--bind-to", "none"});
  Launched free = Launched::run(arguments, {"OMP_NUM_THREADS=1"});
  ASSERT_EQ(free.wait(), 0);
  lines = lines_of(free.output());
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].substr(4), lines[1].substr(4)) << free.output();
}

TEST(Cores, CountsGpusByTheirDevices) {
  const Folder folder;
  EXPECT_EQ(num_visible_gpus(folder.path()), 0);
  for (const char* name : {"nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "nvidia"})
    folder.write(name, "");
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  EXPECT_EQ(num_visible_gpus(folder.path()), 3);
  ::setenv("CUDA_VISIBLE_DEVICES", "1,0", 1);
  EXPECT_EQ(num_visible_gpus(folder.path()), 2);
  ::setenv("CUDA_VISIBLE_DEVICES", "1,-1,0", 1);
  EXPECT_EQ(num_visible_gpus(folder.path()), 1);
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EQ(num_visible_gpus(folder.path()), 0);
  ::unsetenv("CUDA_VISIBLE_DEVICES");
}

TEST(Cores, AutomaticNumberOfRanks) {
  Launched job = Launched::run({"--nproc-per-node", "cpu", "sh", "-c", "echo $WORLD_SIZE"});
  ASSERT_EQ(job.wait(), 0);
  const auto expected = device::Host().num_usable_cores();
  EXPECT_THAT(job.output(), HasSubstr("0] " + std::to_string(expected) + "\n"));
}

}  // namespace
}  // namespace lockstep::launch::testing
