#include <lockstep/device/host/host.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include <gtest/gtest.h>
#include <sched.h>

namespace lockstep::device {
namespace {

namespace fs = std::filesystem;

// Writes artificial files in place of the kernel's.
class HostTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lockstep-host-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  Host host() const { return Host(root_); }
  static int allowed() {
    cpu_set_t set;
    EXPECT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
    return CPU_COUNT(&set);
  }

  fs::path root_;
};

TEST_F(HostTest, MemoryWithoutCgroups) {
  EXPECT_EQ(host().memory().total_bytes, 1000u * 1024);
  EXPECT_EQ(host().memory().free_bytes, 600u * 1024);
}

TEST_F(HostTest, MemoryOfCgroupVersion2) {
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/step/memory.current", "5000\n");
  // The limit is set one level up, and 1000 bytes of the use are cache.
  write("sys/fs/cgroup/job/memory.max", "200000\n");
  write("sys/fs/cgroup/job/memory.current", "50000\n");
  write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 1000\n");
  EXPECT_EQ(host().memory().total_bytes, 200000u);
  EXPECT_EQ(host().memory().free_bytes, 151000u);
}

TEST_F(HostTest, MemoryOfCgroupVersion1) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/box\n0::/\n");
  write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "300000\n");
  write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "310000\n");
  write("sys/fs/cgroup/memory/box/memory.stat", "inactive_file 7\ntotal_inactive_file 20000\n");
  EXPECT_EQ(host().memory().total_bytes, 300000u);
  EXPECT_EQ(host().memory().free_bytes, 10000u);
}

TEST_F(HostTest, MemoryOfAContainerThatDoesNotSeeItsPath) {
  write("proc/self/cgroup", "0::/../../elsewhere\n");
  write("sys/fs/cgroup/memory.max", "100000\n");
  write("sys/fs/cgroup/memory.current", "100001\n");
  EXPECT_EQ(host().memory().total_bytes, 100000u);
  EXPECT_EQ(host().memory().free_bytes, 0u);
}

TEST_F(HostTest, CoresFollowAffinityAndQuota) {
  EXPECT_EQ(host().num_usable_cores(), allowed());
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_EQ(host().num_usable_cores(), allowed());
  write("sys/fs/cgroup/cpu.max", "150000 100000\n");
  EXPECT_EQ(host().num_usable_cores(), 1);
  write("sys/fs/cgroup/cpu.max", "20000 100000\n");
  EXPECT_EQ(host().num_usable_cores(), 1);
}

TEST_F(HostTest, TheTightestQuotaCounts) {
  write("proc/self/cgroup", "0::/outer/inner\n");
  write("sys/fs/cgroup/outer/inner/cpu.max", "max 100000\n");
  EXPECT_FALSE(host().cpu_quota());
  write("sys/fs/cgroup/outer/cpu.max", "250000 100000\n");
  EXPECT_EQ(host().cpu_quota(), 2.5);
  write("sys/fs/cgroup/outer/inner/cpu.max", "50000 100000\n");
  EXPECT_EQ(host().cpu_quota(), 0.5);
  write("proc/self/cgroup", "5:cpuset:/x\n4:cpu,cpuacct:/job\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "300000\n");
  write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(host().cpu_quota(), 3.0);
}

TEST_F(HostTest, CoresOfCgroupVersion1) {
  write("proc/self/cgroup", "5:cpu:/box\n");
  write("sys/fs/cgroup/cpu/box/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(host().num_usable_cores(), allowed());
  write("sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(host().num_usable_cores(), 1);
}

TEST_F(HostTest, CpuName) {
  write("proc/cpuinfo", "processor\t: 0\nmodel name\t: Imagined CPU 3000\n");
  EXPECT_EQ(host().cpu_name(), "Imagined CPU 3000");
  write("proc/cpuinfo", "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n");
  EXPECT_NE(host().cpu_name().find("implementer 0x41, part 0xd4f"), std::string::npos);
}

TEST_F(HostTest, UtilisationIsTheShareBetweenTwoSamples) {
  // The file lists every core, so this process's affinity does not matter.
  const auto write_stat = [&](int busy, int idle) {
    std::string text = "cpu  1 2 3 4 5 6 7 8 9 10\n";
    for (int core = 0; core < 1024; ++core)
      text += "cpu" + std::to_string(core) + " " + std::to_string(busy) + " 0 0 " +
              std::to_string(idle) + " 0 0 0 0 0 0\n";
    write("proc/stat", text);
  };
  write_stat(100, 100);
  Host host(root_);
  EXPECT_EQ(host.utilisation(), std::nullopt);
  write_stat(130, 110);
  EXPECT_DOUBLE_EQ(host.utilisation().value_or(-1), 0.75);
  write_stat(130, 120);
  EXPECT_DOUBLE_EQ(host.utilisation().value_or(-1), 0.0);
}

TEST_F(HostTest, NothingIsKnownOfAnEmptyRoot) {
  Host host(root_ / "nothing");
  EXPECT_EQ(host.memory().total_bytes, 0u);
  EXPECT_EQ(host.utilisation(), std::nullopt);
  EXPECT_GE(host.num_usable_cores(), 1);
  EXPECT_FALSE(host.cpu_name().empty());
}

TEST(ThisHost, IsPlausible) {
  Host host;
  EXPECT_GT(host.memory().total_bytes, 64u << 20);
  EXPECT_GT(host.memory().free_bytes, 0u);
  EXPECT_LE(host.memory().free_bytes, host.memory().total_bytes);
  const auto busy = host.utilisation(std::chrono::milliseconds(50));
  ASSERT_TRUE(busy.has_value());
  EXPECT_GE(*busy, 0);
  EXPECT_LE(*busy, 1);
}

}  // namespace
}  // namespace lockstep::device
