#include <lockstep/multi_node/multi_node_training_manager.h>

#include <signal.h>

#include <filesystem>

#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../base/errors.h"
#include "../launch/launched.h"

namespace lockstep {
namespace {

using launch::testing::Launched;
using ::testing::HasSubstr;

const std::string kMultiNodeProgram = std::filesystem::read_symlink("/proc/self/exe").string();

Launched start(const std::string& what, std::vector<std::string> variables = {}) {
  variables.emplace_back("OMP_NUM_THREADS=1");
  // a host without GPUs runs as many ranks as it is told to
  variables.emplace_back("CUDA_VISIBLE_DEVICES=");
  return Launched({kMultiNodeProgram, "--job", what}, variables);
}

std::string complaint(const MultiNodeOptions& options, int num_nodes, int gpus_per_node) {
  return usage_error([&] { MultiNodeTrainingManager(options).setup(num_nodes, gpus_per_node); });
}

TEST(MultiNodeTrainingManager, StartsItsProgramAsRanksThatJoin) {
  Launched job = start("sum");
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("rank 0 of 2, sum 3, generation 0"));
  EXPECT_THAT(job.output(), HasSubstr("rank 1 of 2, sum 3, generation 0"));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(MultiNodeTrainingManager, ReturnsWhatARankThatFailsReturned) {
  Launched job = start("fail");
  EXPECT_EQ(job.wait(), 7) << job.error();
  EXPECT_THAT(job.error(), HasSubstr("\"exit_code\":7,\"generation\":1,\"restarted\":false"));
}

TEST(MultiNodeTrainingManager, StartsRanksAnewAfterAFailure) {
  Launched job = start("killed once");
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("rank 1 of 2, sum 3, generation 1"));
}

// The process has threads of libraries, too, which a launcher must not have.
TEST(MultiNodeTrainingManager, EndsItsJobWhenItIsTold) {
  Launched job = start("wait");
  ASSERT_TRUE(job.says("sum 3"));
  ::kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.wait(), 128 + SIGTERM) << job.error();
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(MultiNodeTrainingManager, LeavesNothingBehindWhenItIsKilled) {
  Launched job = start("wait");
  ASSERT_TRUE(job.says("sum 3"));
  ::kill(job.pid(), SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(MultiNodeTrainingManager, ARankOfAnotherJob) {
  Launched job = start("sum", {"RANK=0", "LOCAL_RANK=0", "WORLD_SIZE=1", "LOCAL_WORLD_SIZE=1",
                               "MASTER_ADDR=127.0.0.1", "MASTER_PORT=1"});
  EXPECT_EQ(job.wait(), 9);
  EXPECT_THAT(job.error(), HasSubstr("setup(1, 2): this process is a rank that"));
  EXPECT_THAT(job.error(), HasSubstr("on 1 host with 1 rank each"));
}

TEST(MultiNodeTrainingManager, SaysWhatTheJobIs) {
  MultiNodeTrainingManager several(
      {.endpoint = "a:29400,b:29400", .secret_file = "secret", .min_nodes = 3, .max_restarts = 1});
  several.setup(4, 8);
  EXPECT_EQ(several.description(),
            "3 to 4 hosts of 8 ranks each, which meet at a:29400,b:29400; 1 restart");
  EXPECT_FALSE(several.is_rank());
}

TEST(MultiNodeTrainingManager, RefusesWhatCannotBe) {
  EXPECT_THAT(complaint({}, 0, 1), HasSubstr("setup(0, 1): a job has 1 to"));
  EXPECT_THAT(complaint({}, 1, 0), HasSubstr("setup(1, 0)"));
  EXPECT_THAT(complaint({}, 2, 1), HasSubstr("need MultiNodeOptions::endpoint"));
  EXPECT_THAT(complaint({.endpoint = "a:1"}, 2, 1),
              HasSubstr("need MultiNodeOptions::secret_file"));
  EXPECT_THAT(complaint({.endpoint = "a", .secret_file = "s"}, 2, 1), HasSubstr("as in a:29400"));
  EXPECT_THAT(complaint({.min_nodes = 2}, 1, 1), HasSubstr("min_nodes is 2"));
  EXPECT_THAT(complaint({.node_rank = 1}, 1, 1), HasSubstr("numbered from 0 to 0"));
  EXPECT_THAT(complaint({.max_restarts = -1}, 1, 1), HasSubstr("max_restarts is -1"));
  MultiNodeTrainingManager manager;
  EXPECT_THAT(usage_error([&] { manager.launch({"true"}); }), HasSubstr("call setup("));
  manager.setup(1, 1);
  EXPECT_THAT(usage_error([&] { manager.join(); }), HasSubstr("this process is none"));
  // An error of the launcher comes back from its process.
  EXPECT_THAT(usage_error([&] { manager.launch({"./no-such-program"}); }),
              HasSubstr("no-such-program"));
}

TEST(MultiNodeTrainingManager, LaunchesOtherPrograms) {
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);
  MultiNodeTrainingManager manager;
  manager.setup(1, 2);
  EXPECT_EQ(manager.launch({"true"}), 0);
  EXPECT_EQ(manager.launch({"sh", "-c", "exit $((RANK * 5))"}), 5);
}

}  // namespace
}  // namespace lockstep
