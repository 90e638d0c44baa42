// Runs that are ended from outside, and then go on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <thread>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/folder_lock.h>

#include "tests/base/files.h"
#include "training.h"

namespace lockstep::train::testing {
namespace {

namespace fs = std::filesystem;
using lockstep::testing::read_file;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr milliseconds kLong(60'000);

// A training that is long enough to be ended in the middle.
struct LongTraining : Training {
  LongTraining() {
    set("/model/dropout", 0.1).set("/max_steps", 500).set("/optimizer/params/lr", 1e-3);
  }
};

// A training that only ends from outside.
struct EndlessTraining : LongTraining {
  EndlessTraining() { set("/max_steps", 1'000'000); }
};

pid_t process_of_rank(const Launched& run, int rank) {
  const std::string variable = '\0' + ("RANK=" + std::to_string(rank)) + '\0';
  for (const pid_t pid : run.alive()) {
    const std::string variables = read_file("/proc/" + std::to_string(pid) + "/environ");
    if (('\0' + variables).find(variable) != std::string::npos) return pid;
  }
  return -1;
}

TEST(Interrupted, GoesOnToTheBit) {
  LongTraining training;
  training.train(2, "whole");
  const auto whole = training.losses("whole");
  ASSERT_EQ(whole.size(), 500u);

  Launched run = training.start(2);
  ASSERT_TRUE(run.says("step 10/500")) << run.error();
  run.kill(SIGINT);
  EXPECT_EQ(run.wait(kLong), 130) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_EQ(count(run.output(), "interrupted at step"), 1) << run.output();
  EXPECT_EQ(count(run.output(), "the same command goes on from step"), 1) << run.output();
  EXPECT_EQ(count(run.error(), "saving after this step"), 1) << run.error();
  EXPECT_THAT(run.error(), Not(HasSubstr("failed"))) << "it did as it was told";
  const auto part = training.losses();
  ASSERT_GE(part.size(), 10u);
  ASSERT_LT(part.size(), 500u) << "it was not ended in its middle";
  EXPECT_THAT(training.checkpoint().string(), HasSubstr(std::to_string(part.size())));
  fs::copy(training.output(), training.output("elsewhere"), fs::copy_options::recursive);

  training.train(2);
  EXPECT_EQ(training.losses(), whole);
  EXPECT_EQ(training.weights(), training.weights("whole"));

  training.train(1, "elsewhere");
  const auto elsewhere = training.losses("elsewhere");
  ASSERT_EQ(elsewhere.size(), 500u);
  for (const auto& [step, loss] : whole)
    EXPECT_NEAR(elsewhere.at(step), loss, 1e-3 * loss) << "step " << step;
}

TEST(Interrupted, SigtermSavesToo) {
  EndlessTraining training;
  Launched run = training.start(2);
  ASSERT_TRUE(run.says("step 5/")) << run.error();
  run.kill(SIGTERM);
  EXPECT_EQ(run.wait(kLong), 128 + SIGTERM) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_FALSE(training.checkpoint().empty());
  EXPECT_THAT(training.checkpoint().string(), HasSubstr(std::to_string(training.losses().size())));
}

TEST(Interrupted, TwiceEndsAtOnce) {
  // A step takes many seconds, because it accumulates so many passes.
  Training training(20'000);
  training.set("/train_batch_size", 20'000).set("/train_micro_batch_size_per_gpu", 1);
  Launched run = training.start(1);
  ASSERT_TRUE(run.says("steps of 20000 sequences")) << run.error();
  // The file is made after signals are handled and before the first step.
  ASSERT_TRUE(launch::testing::eventually(
      kLong, [&] { return fs::exists(training.output() / "metrics.csv"); }));
  run.kill(SIGINT);
  EXPECT_EQ(run.wait(milliseconds(500)), -1) << "the first waits for the step to end";
  run.kill(SIGINT);
  // The run does not end at the end of the step, where it would be saved.
  EXPECT_EQ(run.wait(kLong), 130);
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_TRUE(training.checkpoint().empty());
  EXPECT_EQ(count(run.error(), "nothing was saved"), 1) << run.error();
}

// Once the terminal is closed; once with SIGHUP ignored, as under nohup.
TEST(Interrupted, SighupSavesTooUnlessItIsIgnored) {
  EndlessTraining training;
  Launched run = training.start(2);
  ASSERT_TRUE(run.says("step 5/")) << run.error();
  run.kill(SIGHUP);
  EXPECT_EQ(run.wait(kLong), 128 + SIGHUP) << run.error();
  EXPECT_FALSE(training.checkpoint().empty());

  std::vector<std::string> words = {"sh", "-c", "trap '' HUP; exec \"$@\"", "sh"};
  for (const std::string& word : training.command("nohup")) words.push_back(word);
  Launched ignoring(words);
  ASSERT_TRUE(ignoring.says("step 5/")) << ignoring.error();
  for (const pid_t pid : ignoring.alive()) ::kill(pid, SIGHUP);
  const std::string next = "step " + std::to_string(training.losses("nohup").size() + 20) + "/";
  EXPECT_TRUE(ignoring.says(next)) << ignoring.output() << ignoring.error();
  ignoring.kill(SIGTERM);
  EXPECT_EQ(ignoring.wait(kLong), 128 + SIGTERM) << ignoring.error();
}

TEST(Interrupted, ARankSaysWhichSignalItWas) {
  EndlessTraining training;
  Launched run(training.command(),
               {"RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", master_port()});
  ASSERT_TRUE(run.says("step 5/")) << run.error();
  run.kill(SIGTERM);
  EXPECT_EQ(run.wait(kLong), 128 + SIGTERM) << run.error();
}

// One reader has read enough, and another never reads.
TEST(Interrupted, TrainingGoesOnWithoutAReader) {
  for (const char* reader : {"head -n 1", "head -c 0"}) {
    Training training;
    std::vector<std::string> words = {
        "sh", "-c", std::string("{ \"$@\"; echo ended $? >&2; } | ") + reader, "sh"};
    for (const std::string& word : training.command()) words.push_back(word);
    Launched run(words);
    EXPECT_EQ(run.wait(kLong), 0) << run.error();
    EXPECT_THAT(run.error(), HasSubstr("ended 0")) << reader;
    EXPECT_EQ(training.losses().size(), 12u) << reader;
    EXPECT_THAT(training.checkpoint().string(), HasSubstr("step-00000012")) << reader;
  }
  Training training;
  std::vector<std::string> words = {"sh", "-c", "exec \"$@\" >&-", "sh"};
  for (const std::string& word : training.command()) words.push_back(word);
  Launched run(words);
  EXPECT_EQ(run.wait(kLong), 0) << run.error();
  EXPECT_THAT(training.checkpoint().string(), HasSubstr("step-00000012"));
}

TEST(Interrupted, KilledRankEndsTheOtherAndLosesNoCheckpoint) {
  LongTraining training;
  training.set("/max_steps", 1'000'000).set("/checkpoint/interval", 10);
  Launched run = training.start(2);
  ASSERT_TRUE(run.says("step 40/")) << run.error();
  const pid_t victim = process_of_rank(run, 1);
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  EXPECT_EQ(run.wait(kLong), 128 + SIGKILL) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_THAT(run.error(), HasSubstr("rank 1"));
  EXPECT_THAT(run.error(), HasSubstr("SIGKILL"));

  const int saved = std::stoi(training.checkpoint().filename().string().substr(5));
  EXPECT_GE(saved, 20) << "that of step 30 may still have been written";
  EXPECT_THAT(run.error(),
              HasSubstr("the same command goes on from step " + std::to_string(saved)));
  EXPECT_EQ(saved % 10, 0);
  training.train(1, "run", {"--set", "max_steps=" + std::to_string(saved + 2)});
  EXPECT_EQ(training.losses().size(), static_cast<std::size_t>(saved + 2));
}

// After a restart, ranks go on with the run that they were in, even if it was told to begin from
// nothing.
TEST(Interrupted, AKilledRankIsStartedAnewAndTheResultIsTheSameToTheBit) {
  LongTraining training;
  training.set("/checkpoint/interval", 10).set("/max_steps", 120);
  training.set("/checkpoint/resume", "never");
  training.train(2, "whole");
  Launched run = training.start(2, "run", {"--max-restarts", "1"});
  ASSERT_TRUE(run.says("step 30/")) << run.error();
  const pid_t victim = process_of_rank(run, 1);
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  EXPECT_EQ(run.wait(kLong), 0) << run.error();
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_THAT(run.error(), HasSubstr("goes on from step"));
  EXPECT_THAT(run.error(), HasSubstr("\"restarted\":true"));
  EXPECT_EQ(training.losses().size(), 120u);
  EXPECT_EQ(training.weights(), training.weights("whole"));
}

// The checkpoint that the run was told to begin from is its own, and by then it is older than those
// that are kept.
TEST(Interrupted, AKilledRankIsStartedAnewWhereWhatTheRunBeganFromIsGone) {
  LongTraining training;
  training.set("/checkpoint", {{"interval", 10}, {"keep", 1}}).set("/max_steps", 10).train(2);
  const fs::path first = training.checkpoint();
  training.set("/checkpoint/resume", first.string()).set("/max_steps", 120);
  Launched run = training.start(2, "run", {"--max-restarts", "1"});
  ASSERT_TRUE(launch::testing::eventually(kLong, [&] { return !fs::exists(first); }))
      << run.error();
  const pid_t victim = process_of_rank(run, 1);
  ASSERT_GT(victim, 0);
  ::kill(victim, SIGKILL);
  EXPECT_EQ(run.wait(kLong), 0) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("\"restarted\":true"));
  EXPECT_EQ(training.losses().size(), 120u);
}

// As if its host had been stopped for a while: when it wakes up, a later generation has its folder.
// Its launcher decides what it does then.
TEST(Interrupted, OneThatWasReplacedDoesNotEndTheJob) {
  EndlessTraining training;
  training.set("/checkpoint", {{"interval", 10}, {"async", false}});
  Launched run = training.start(1, "run", {"--max-restarts", "1"});
  ASSERT_TRUE(run.says("step 20/")) << run.error();
  const std::string words = "generation 0 of job ";
  const std::string note = read_file(training.output() / ".holder");
  ASSERT_TRUE(note.starts_with(words)) << note;
  const std::string job = note.substr(words.size(), note.size() - words.size() - 1);
  { const FolderLock later(training.output(), FolderHolder{.job = job, .generation = 1}); }
  ASSERT_TRUE(launch::testing::eventually(kLong, [&] {
    return run.error().find("goes on from step") != std::string::npos;
  })) << run.error();
  EXPECT_THAT(run.error(), HasSubstr("\"restarted\":true"));
  run.kill(SIGINT);
  EXPECT_EQ(run.wait(kLong), 130) << run.error();
}

// Nothing is on the disk: the other ranks have the lost rank's state in their memory, whichever
// rank it was.
TEST(Interrupted, AKilledRankCostsOneStepWithCopiesInMemory) {
  LongTraining training;
  training.set("/checkpoint/interval", 0).set("/max_steps", 120);
  training.set("/checkpoint/memory_interval", 1).set("/sharding_strategy", "FULL_SHARD");
  training.set("/train_batch_size", 6);
  training.train(3, "whole");
  for (const int lost : {0, 2}) {
    const std::string name = "lost-" + std::to_string(lost);
    Launched run = training.start(3, name, {"--max-restarts", "1"});
    ASSERT_TRUE(run.says("step 30/")) << run.error();
    // As if the checkpoints on the disk were gone: nobody needs them.
    if (lost == 2)
      lockstep::testing::write_file(training.output(name) / "saved.json", "{\"step\": 9}");
    const pid_t victim = process_of_rank(run, lost);
    ASSERT_GT(victim, 0);
    ::kill(victim, SIGKILL);
    EXPECT_EQ(run.wait(kLong), 0) << run.error();
    EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
    const std::string error = run.error();
    const std::string words = "goes on from step ";
    const auto at = error.find(words);
    ASSERT_NE(at, std::string::npos) << error;
    EXPECT_GE(std::stoi(error.substr(at + words.size())), 29) << error;
    EXPECT_THAT(error, HasSubstr("(copies in the ranks' memory)"));
    EXPECT_EQ(training.losses(name), training.losses("whole"));
    EXPECT_EQ(training.weights(name), training.weights("whole"));
  }
}

// Wherever the ranks are on their way back, the run goes on from the step that it printed.
TEST(Interrupted, ToldToEndWhileRanksComeTogetherAgain) {
  for (const int wait_ms : {0, 300, 700, 1200, 2000}) {
    SCOPED_TRACE(wait_ms);
    EndlessTraining training;
    training.set("/checkpoint/interval", 25).set("/checkpoint/memory_interval", 1);
    Launched run = training.start(2, "run", {"--max-restarts", "1"});
    ASSERT_TRUE(launch::testing::eventually(kLong, [&] { return !training.checkpoint().empty(); }))
        << run.error();
    ::kill(process_of_rank(run, 1), SIGKILL);
    ASSERT_TRUE(launch::testing::eventually(kLong, [&] {
      return run.error().find("lockstep: fault") != std::string::npos;
    })) << run.error();
    std::this_thread::sleep_for(milliseconds(wait_ms));
    run.kill(SIGTERM);
    EXPECT_EQ(run.wait(kLong), 128 + SIGTERM) << run.error();
    EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
    const std::int64_t saved = std::stoll(training.checkpoint().filename().string().substr(5));
    EXPECT_THAT(run.error(),
                HasSubstr(fmt::format("lockstep: the same command goes on from step {} ", saved)));
    // Ranks that have come together, and have printed the step that they go on from, save at least
    // that step.
    const std::string words = "rank 0] goes on from step ";
    const auto at = run.error().rfind(words);
    if (at != std::string::npos) {
      EXPECT_GE(saved, std::stoll(run.error().substr(at + words.size())));
    }
  }
}

TEST(Interrupted, ARankThatDoesNotGetOnIsStuck) {
  LongTraining training;
  training.set("/max_steps", 1'000'000);
  Launched run = training.start(2, "run", {"--stuck-after", "3"});
  ASSERT_TRUE(run.says("step 10/")) << run.error();
  const pid_t victim = process_of_rank(run, 1);
  ASSERT_GT(victim, 0);
  // Without a restart this is no failure by itself, but no rank makes progress.
  ::kill(victim, SIGSTOP);
  EXPECT_NE(run.wait(kLong), 0);
  EXPECT_TRUE(run.all_gone(milliseconds(60'000)));
  EXPECT_THAT(run.error(), HasSubstr("no progress for"));
}

// 12 of the first epoch's 76 sequences are left, fewer than a step of the larger batch.
TEST(Interrupted, GoesOnWithALargerBatchWhereTheEpochHasNoStepOfItLeft) {
  Training training;
  training.set("/dataloader_drop_last", true).set("/epochs", 2).set("/max_steps", 8);
  training.train(2);
  training.config.erase("max_steps");
  training.set("/train_batch_size", 16);
  Launched run = training.start(2);
  EXPECT_EQ(run.wait(kLong), 0) << run.error();
  EXPECT_EQ(training.losses().size(), 8u + 4u) << "the second epoch has four steps";
  EXPECT_THAT(run.output(), HasSubstr("step 12/12")) << "what is done, and what is left";
}

// Each run would succeed by itself.
TEST(Interrupted, TwoRunsInOneFolderAreKeptApart) {
  LongTraining training;
  training.set("/max_steps", 1'000'000).set("/checkpoint/interval", 0).set("/seed", 1);
  training.set("/train_batch_size", 64);
  Launched first = training.start(1);
  ASSERT_TRUE(first.says("step 5/")) << first.error();
  const std::string config = read_file(training.output() / "config.json");
  const std::string in_the_way = "another run writes into '" + training.output().string() + "'";

  training.set("/seed", 2);
  Launched second = training.start(2);
  EXPECT_EQ(second.wait(kLong), 2) << second.error();
  EXPECT_EQ(count(second.error(), in_the_way), 1) << second.error();
  EXPECT_EQ(second.output(), "") << "no rank was started";

  // Ranks that another launcher starts find that out by themselves.
  std::vector<std::string> words = training.command();
  words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2"});
  Launched third(words);
  EXPECT_EQ(third.wait(kLong), 2) << third.error();
  EXPECT_THAT(third.error(), HasSubstr(in_the_way));
  EXPECT_EQ(third.error().find("[1] lockstep"), std::string::npos) << "one rank says it";

  EXPECT_EQ(read_file(training.output() / "config.json"), config);
  first.kill(SIGINT);
  EXPECT_EQ(first.wait(kLong), 130) << first.error();
  EXPECT_GT(training.losses().size(), 4u);
  training.set("/seed", 1);
  training.train(1, "run", {"--set", "max_steps=" + std::to_string(training.losses().size() + 1)});
}

TEST(Interrupted, SaysWhatIsOtherThanItWas) {
  Training training;
  training.train(1);
  training.set("/max_steps", 14).set("/optimizer/params/lr", 1e-3).set("/train_batch_size", 4);
  Launched run = training.start(1);
  EXPECT_EQ(run.wait(kLong), 0) << run.error();
  EXPECT_THAT(run.output(), HasSubstr("train_batch_size is 4, was 8"));
  EXPECT_THAT(run.output(), HasSubstr("optimizer.params.lr is 0.001, was 0.003"));
  EXPECT_THAT(run.output(), Not(HasSubstr("dropout is")));
}

TEST(Interrupted, OldCheckpointsAreNotTakenForNewOnes) {
  Training training;
  training.train(1);
  const std::string before = training.weights();
  Launched anew = training.start(1, "run", {"--set", "checkpoint.resume=never"});
  EXPECT_EQ(anew.wait(), 2);
  EXPECT_THAT(anew.error(), HasSubstr("has checkpoints of another up to step 12"));
  EXPECT_EQ(training.weights(), before);
  training.set("/checkpoint/resume", training.checkpoint().string()).set("/max_steps", 14);
  training.train(1, "other");
  EXPECT_EQ(training.losses("other").begin()->first, 13);
}

}  // namespace
}  // namespace lockstep::train::testing
