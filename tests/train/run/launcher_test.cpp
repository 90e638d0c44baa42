// `lockstep train` as a rank under a launcher.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::HasSubstr;

TEST(UnderALauncher, LockstepRun) {
  Training training;
  std::vector<std::string> words = training.command();
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2"});
  Launched run(words);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  EXPECT_THAT(run.output(), HasSubstr("2 ranks"));
  EXPECT_EQ(count(run.output(), "done at step"), 1) << run.output();
  EXPECT_EQ(training.losses().size(), 12u);

  words.insert(words.end(), {"--nproc-per-node", "2"});
  Launched nested(words);
  EXPECT_EQ(nested.wait(milliseconds(60'000)), 2);
  EXPECT_THAT(nested.error(), HasSubstr("already a rank, started by lockstep run"));
}

TEST(UnderALauncher, TorchrunsVariables) {
  Training training;
  launch::testing::Folder folder;
  const std::string secret = folder.write("secret", std::string(32, 's'), 0600);
  const std::string port = master_port();
  const auto rank = [&](int number) {
    const std::string text = std::to_string(number);
    return Launched(training.command(),
                    {"RANK=" + text, "LOCAL_RANK=" + text, "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=2",
                     "MASTER_ADDR=127.0.0.1", port, "LOCKSTEP_SECRET_FILE=" + secret});
  };
  Launched first = rank(0);
  Launched second = rank(1);
  EXPECT_EQ(first.wait(milliseconds(60'000)), 0) << first.error();
  EXPECT_EQ(second.wait(milliseconds(60'000)), 0) << second.error();
  EXPECT_THAT(first.output(), HasSubstr("2 ranks"));
  EXPECT_EQ(second.output(), "");
  EXPECT_EQ(training.losses().size(), 12u);
}

// By the launcher's variables there are two hosts, each with one rank of the axis.
TEST(UnderALauncher, ATensorAxisAcrossHostsIsWarnedOf) {
  Training training;
  training.set("/parallel", {{"tensor", 2}});
  const std::string port = master_port();
  const auto rank = [&](const std::string& number) {
    return Launched(training.command(),
                    {"RANK=" + number, "GROUP_RANK=" + number, "LOCAL_RANK=0", "WORLD_SIZE=2",
                     "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", port});
  };
  Launched first = rank("0");
  Launched second = rank("1");
  EXPECT_EQ(first.wait(milliseconds(60'000)), 0) << first.error();
  EXPECT_EQ(second.wait(milliseconds(60'000)), 0) << second.error();
  EXPECT_THAT(first.error(), HasSubstr("reaches over hosts (ranks 0 of host 0 with 1 of host 1)"));
  EXPECT_THAT(first.error(), HasSubstr("a sum of 1 MiB takes"));
  EXPECT_EQ(second.error().find("reaches over hosts"), std::string::npos);
}

TEST(UnderALauncher, ThreadsAreWhatTheUserSaidOrAShareOfTheCores) {
  Training training;
  training.set("/threads_per_rank", "auto");
  const auto opening = [&](const std::string& output, const std::vector<std::string>& variables) {
    const std::string port = master_port();
    const auto rank = [&](const std::string& number) {
      const std::vector<std::string> all = {"RANK=" + number,        "LOCAL_RANK=" + number,
                                            "WORLD_SIZE=2",          "LOCAL_WORLD_SIZE=2",
                                            "MASTER_ADDR=127.0.0.1", port};
      std::vector<std::string> words = {"env", "-u", "OMP_NUM_THREADS"};
      words.insert(words.end(), variables.begin(), variables.end());
      for (const std::string& word : training.command(output)) words.push_back(word);
      return Launched(words, all);
    };
    Launched first = rank("0");
    Launched second = rank("1");
    EXPECT_EQ(first.wait(milliseconds(60'000)), 0) << first.error();
    EXPECT_EQ(second.wait(milliseconds(60'000)), 0) << second.error();
    return first.output();
  };
  EXPECT_THAT(opening("three", {"OMP_NUM_THREADS=3"}), HasSubstr(", 3 threads each"));
  if (::sysconf(_SC_NPROCESSORS_ONLN) != 2) GTEST_SKIP() << "whose share is known for two cores";
  EXPECT_THAT(opening("share", {}), HasSubstr(", 1 thread each"));
}

// This holds however many restarts are left, with each of our launchers.
TEST(UnderALauncher, NoRestartIsMadeWhereItCannotHelp) {
  struct Case {
    const char* name;
    std::vector<std::string> settings;
    int code;
    const char* says;
  };
  for (const Case& one :
       {Case{"config", {"optimizer.params.lrr=1"}, 2, "did you mean 'lr'"},
        Case{"flag", {"max_steps=4", "--nproc-per-node", "2"}, 2, "already a rank"},
        Case{"loss",
             {"optimizer={\"type\":\"SGD\",\"params\":{\"lr\":1000}}", "--set",
              "gradient_clipping=0"},
             3,
             "the loss is nan"}}) {
    SCOPED_TRACE(one.name);
    Training training;
    training.config.erase("scheduler");
    std::vector<std::string> words = training.command();
    words.push_back("--set");
    words.insert(words.end(), one.settings.begin(), one.settings.end());
    words.insert(words.begin(),
                 {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2", "--max-restarts", "3"});
    Launched run(words);
    EXPECT_EQ(run.wait(milliseconds(60'000)), one.code) << run.error();
    EXPECT_THAT(run.error(), HasSubstr(one.says));
    const auto faults = launch::testing::faults_in(run.error());
    ASSERT_EQ(faults.size(), 1u) << run.error();
    EXPECT_EQ(nlohmann::json::parse(faults[0])["restarted"], false);
  }
}

// A generation of a job whose first generation was lost before it saw what is in the folder.
TEST(UnderALauncher, CheckpointsOfAnotherJobInALaterGeneration) {
  Training training;
  training.train(1);
  const std::string first = training.checkpoint().string();
  training.train(1, "run", {"--set", "max_steps=14"});
  for (const std::string& resume : {std::string("never"), first}) {
    training.set("/checkpoint/resume", resume);
    Launched run(training.command(),
                 {"RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", master_port(),
                  "TORCHELASTIC_RUN_ID=job", "LOCKSTEP_GENERATION=1"});
    EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << run.error();
    EXPECT_THAT(run.error(), HasSubstr("has checkpoints of another up to step 14"));
  }
}

// Ranks make the same checks as the launching program.
TEST(UnderALauncher, ACheckpointOfAnotherModel) {
  Training training;
  training.train(1);
  training.set("/model/hidden_size", 32);
  std::vector<std::string> words = training.command();
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2"});
  Launched run(words);
  EXPECT_EQ(run.wait(milliseconds(60'000)), 2) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("model.hidden_size is 32, was 16"));
  EXPECT_EQ(run.error().find("[1] lockstep"), std::string::npos) << "one rank says it";
}

}  // namespace
}  // namespace lockstep::train::testing
