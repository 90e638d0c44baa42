// The environment variables that ranks get.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using Variables = std::map<std::string, std::string>;

// The environment that each rank printed, by rank.
std::map<int, Variables> environments(const std::string& output) {
  std::map<int, Variables> all;
  for (const std::string& line : lines_of(output)) {
    const auto close = line.find("] ");
    const auto equals = line.find('=');
    if (line[0] != '[' || close == std::string::npos || equals == std::string::npos) continue;
    all[std::stoi(line.substr(1))][line.substr(close + 2, equals - close - 2)] =
        line.substr(equals + 1);
  }
  return all;
}

TEST(Environment, IsTorchruns) {
  Launched job = Launched::run({"--nproc_per_node=3", "--rdzv-id", "job7", "--role", "trainer",
                                "--master-port", "23456", "env"},
                               {"RANK=99", "WORLD_SIZE=100", "MASTER_PORT=1",
                                "TORCHELASTIC_USE_AGENT_STORE=True", "KEPT=yes"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  const auto ranks = environments(job.output());
  ASSERT_EQ(ranks.size(), 3u);
  for (const auto& [rank, variables] : ranks) {
    const std::string number = std::to_string(rank);
    const Variables expected = {
        {"RANK", number},
        {"LOCAL_RANK", number},
        {"WORLD_SIZE", "3"},
        {"LOCAL_WORLD_SIZE", "3"},
        {"GROUP_RANK", "0"},
        {"GROUP_WORLD_SIZE", "1"},
        {"ROLE_RANK", number},
        {"ROLE_WORLD_SIZE", "3"},
        {"ROLE_NAME", "trainer"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "23456"},
        {"TORCHELASTIC_RESTART_COUNT", "0"},
        {"TORCHELASTIC_MAX_RESTARTS", "0"},
        {"TORCHELASTIC_RUN_ID", "job7"},
        {"TORCHELASTIC_USE_AGENT_STORE", "False"},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"},
        {"KEPT", "yes"},
    };
    for (const auto& [name, value] : expected) {
      ASSERT_TRUE(variables.contains(name)) << name;
      EXPECT_EQ(variables.at(name), value) << name;
    }
    EXPECT_GE(std::stoi(variables.at("OMP_NUM_THREADS")), 1);
    EXPECT_EQ(variables.at("OPENBLAS_NUM_THREADS"), variables.at("OMP_NUM_THREADS"));
    EXPECT_EQ(variables.at("GOMP_SPINCOUNT"), "1000");
    EXPECT_THAT(variables.at("LOCKSTEP_STORE"), HasSubstr("127.0.0.1:"));
    EXPECT_NE(variables.at("LOCKSTEP_STORE"), "127.0.0.1:23456");
  }
}

TEST(Environment, KeepsTheUsersThreads) {
  Launched job = Launched::run(
      {"env"}, {"OMP_NUM_THREADS=7", "OPENBLAS_NUM_THREADS=5", "OMP_WAIT_POLICY=active"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  const auto ranks = environments(job.output());
  EXPECT_EQ(ranks.at(0).at("OMP_WAIT_POLICY"), "active");
  EXPECT_FALSE(ranks.at(0).contains("GOMP_SPINCOUNT")) << "which would count for more";
  EXPECT_EQ(ranks.at(0).at("OMP_NUM_THREADS"), "7");
  EXPECT_EQ(ranks.at(0).at("OPENBLAS_NUM_THREADS"), "5");
}

TEST(Environment, LeadsProgramsOfOursToTheStore) {
  Launched job = Launched::run({"--nproc-per-node", "2", "--standalone", RANK_PROGRAM});
  ASSERT_EQ(job.wait(), 0) << job.error();
  for (const char* rank : {"0", "1"})
    EXPECT_THAT(job.output(),
                HasSubstr(std::string("[") + rank + "] launcher=lockstep run rank=" + rank +
                          " world=2 local=" + rank + "/2 node=0/1 flight=yes"));
}

TEST(Environment, PassesTheProgramsOwnArgumentsUntouched) {
  Launched job = Launched::run(
      {"--nproc-per-node=1", "printf", "%s|", "--nnodes", "7", "--", "--nproc_per_node", "-h", ""});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(job.output(), "[0] --nnodes|7|--|--nproc_per_node|-h||\n");
}

TEST(Environment, StartsPythonScriptsAndModules) {
  const Folder folder;
  const std::string script = folder.write("it.py", "import os, sys\nprint(sys.argv[1])\n");
  Launched by_name = Launched::run({script, "from-python"});
  EXPECT_EQ(by_name.wait(), 0) << by_name.error();
  EXPECT_EQ(by_name.output(), "[0] from-python\n");
  Launched module =
      Launched::run({"-m", "it", "from-module"}, {"PYTHONPATH=" + folder.path().string()});
  EXPECT_EQ(module.wait(), 0) << module.error();
  EXPECT_EQ(module.output(), "[0] from-module\n");
  const std::string shell = folder.write("sh.py", "#!/bin/sh\necho from-sh $1\n", 0755);
  Launched itself = Launched::run({"--no-python", shell, "x"});
  EXPECT_EQ(itself.wait(), 0) << itself.error();
  EXPECT_EQ(itself.output(), "[0] from-sh x\n");
}

TEST(Environment, RunsProgramsWrittenForTorchDistributed) {
  constexpr const char* kPython = "/usr/bin/python3";
  Launched probe({kPython, "-c", "import torch.distributed as d; assert d.is_gloo_available"});
  if (probe.wait(milliseconds(60'000)) != 0)
    GTEST_SKIP() << "PyTorch is not installed for " << kPython;
  const Folder folder;
  const std::string script = folder.write("all_reduce.py", R"(
import os
os.environ["USE_LIBUV"] = "0"  # not every build of PyTorch has it
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
t = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(t)
print("sum", t.item(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
)");
  Launched job = Launched::run({"--nproc-per-node", "2", kPython, script});
  ASSERT_EQ(job.wait(milliseconds(60'000)), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("[0] sum 3.0 of 2\n"));
  EXPECT_THAT(job.output(), HasSubstr("[1] sum 3.0 of 2\n"));
}

}  // namespace
}  // namespace lockstep::launch::testing
