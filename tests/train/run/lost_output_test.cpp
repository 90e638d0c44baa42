// A standard output that cannot be written to: the missing output must not go unnoticed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "training.h"

namespace lockstep::train::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

const std::string kLost = "the standard output cannot be written: No space left on device";

// Runs `shell`, in which "$@" stands for these words.
std::vector<std::string> in_shell(const std::string& shell, std::vector<std::string> words) {
  words.insert(words.begin(), {"bash", "-c", shell, "bash"});
  return words;
}

// The run is trained to its end, whoever started the rank, and whether or not a launcher stands
// between it and the disk.
TEST(LostOutput, OfATrainingIsAnErrorAtItsEnd) {
  for (const std::string way : {"lockstep train", "torchrun", "lockstep run"}) {
    SCOPED_TRACE(way);
    Training training;
    std::vector<std::string> words = in_shell("exec \"$@\" > /dev/full", training.command());
    std::vector<std::string> variables;
    if (way == "lockstep run")
      words.insert(words.begin(), {LOCKSTEP_PROGRAM, "run", "--nproc-per-node", "2"});
    if (way == "torchrun")
      variables = {"RANK=0",       "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
                   "WORLD_SIZE=1", master_port(),  "MASTER_ADDR=127.0.0.1"};
    Launched run(std::move(words), std::move(variables));
    EXPECT_EQ(run.wait(milliseconds(60'000)), 3) << run.error();
    EXPECT_THAT(run.error(), HasSubstr("lockstep: " + kLost));
    EXPECT_EQ(training.losses().size(), 12u);
    EXPECT_FALSE(training.checkpoint().empty());
  }
}

TEST(LostOutput, AReaderWhoHasSeenEnoughLosesNothing) {
  Training training;
  Launched run(in_shell("set -o pipefail; \"$@\" | head -n 1", training.command()));
  EXPECT_EQ(run.wait(milliseconds(60'000)), 0) << run.error();
  EXPECT_THAT(run.error(), Not(HasSubstr("cannot be written")));
  EXPECT_EQ(training.losses().size(), 12u);
}

TEST(LostOutput, IsAnErrorOfEveryVerb) {
  Training training;
  training.train(1);
  const std::string run = training.output().string();
  const std::string config = (training.folder() / "config.json").string();
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"train", "--describe", config},
           {"train", "--schema"},
           {"plan", "memory", config},
           {"plan", "schedule", "--stages", "2", "--micro-batches", "4"},
           {"ckpt", "ls", run},
           {"ckpt", "show", "--tensors", run},
           {"ckpt", "verify", run},
           {"ckpt", "diff", run, run},
           {"ckpt", "export", run, (training.folder() / "exported").string()},
           {"sample", run, "--max-tokens", "5"},
           {"check"},
           {"check", "--json"},
           {"check", "--nproc-per-node", "2"},
           {"bench", "collectives", "--max", "4K", "--iterations", "1", "--warmup", "0"},
           {"bench", "collectives", "--max", "4K", "--iterations", "1", "--warmup", "0", "--json"},
       }) {
    std::string command;
    for (const std::string& word : words) command += " " + word;
    SCOPED_TRACE(command);
    std::vector<std::string> all = words;
    all.insert(all.begin(), LOCKSTEP_PROGRAM);
    Launched verb(in_shell("exec \"$@\" > /dev/full", std::move(all)));
    EXPECT_EQ(verb.wait(milliseconds(60'000)), 1) << verb.error();
    EXPECT_THAT(verb.error(),
                AllOf(HasSubstr("cannot be written: "), HasSubstr("No space left on device")));
  }
}

}  // namespace
}  // namespace lockstep::train::testing
