// Every launcher runs the same program, whose output does not depend on the launcher.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/net/socket.h>

namespace lockstep {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

struct Outcome {
  int exit_code = -1;
  std::string output;  // stdout and stderr
};

// Every wait in the programs has a deadline; this one is the last resort.
Outcome run(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = ::popen(("exec 2>&1; timeout 60 " + command).c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer;
  while (const std::size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.output.append(buffer.data(), got);
  const int status = ::pclose(pipe);
  outcome.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

bool works(const std::string& command) { return run(command).exit_code == 0; }

void expect_hello(const Outcome& outcome, int ranks) {
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
  const std::string sum = std::to_string(ranks * (ranks + 1) / 2);
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_THAT(outcome.output, HasSubstr("rank " + std::to_string(rank) + " of " +
                                          std::to_string(ranks) + ": the sum is " + sum));
}

std::string free_port() { return std::to_string(net::free_port("127.0.0.1")); }

const std::string kHello = HELLO;
const std::string kLauncher = LAUNCHER;

TEST(Launchers, None) { expect_hello(run(kHello), 1); }

TEST(Launchers, LockstepRun) {
  expect_hello(run(kLauncher + " run --nproc-per-node 3 " + kHello), 3);
}

TEST(Launchers, Torchrun) {
  // Debian 12's torchrun cannot start any program under Python 3.11. Debian testing's asks for a
  // store that its PyTorch was built without.
  std::string torchrun;
  for (const std::string python : {"python3 ", "/usr/bin/python3 "}) {
    for (const std::string module : {"-m torch.distributed.run", TORCHRUN_WITHOUT_LIBUV}) {
      const std::string start = python + module + " --standalone --nproc_per_node 2 --no_python ";
      if (torchrun.empty() && works(start + "/bin/true")) torchrun = start;
    }
  }
  if (torchrun.empty()) GTEST_SKIP() << "no torchrun that works here";
  const Outcome outcome = run(torchrun + kHello);
  expect_hello(outcome, 2);
  EXPECT_THAT(outcome.output, HasSubstr("has no secret of its own"));
  // The warning is printed once, and only if anyone could read the store.
  const auto first = outcome.output.find("has no secret of its own");
  EXPECT_EQ(outcome.output.find("has no secret of its own", first + 1), std::string::npos);
}

TEST(Launchers, VariablesSetByHand) {
  std::string command = "sh -c 'export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
                        "MASTER_PORT=" +
                        free_port() + "; ";
  command += "RANK=1 LOCAL_RANK=1 " + kHello + " & RANK=0 LOCAL_RANK=0 " + kHello + "; wait'";
  expect_hello(run(command), 2);
}

TEST(Launchers, Mpirun) {
  if (!works("mpirun --version")) GTEST_SKIP() << "no mpirun here";
  const Outcome outcome =
      run("env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe "
          "-n 3 " +
          kHello);
  if (outcome.output.find("built without MPI") != std::string::npos)
    GTEST_SKIP() << "this build has no MPI";
  expect_hello(outcome, 3);
}

TEST(Launchers, Srun) {
  // The variables can be tested without Slurm.
  std::string command = "sh -c 'umask 077; secret=$(mktemp); head -c 32 /dev/urandom > $secret; "
                        "export LOCKSTEP_SECRET_FILE=$secret SLURM_STEP_ID=0 SLURM_JOB_ID=7 "
                        "SLURM_NTASKS=2 SLURM_NNODES=1 SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 "
                        "MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
                        free_port() + "; ";
  command += "SLURM_PROCID=1 SLURM_LOCALID=1 " + kHello + " & SLURM_PROCID=0 SLURM_LOCALID=0 " +
             kHello + "; wait; rm $secret'";
  expect_hello(run(command), 2);
}

TEST(Launchers, WhatIsMissingIsNamed) {
  Outcome outcome = run("env RANK=0 WORLD_SIZE=2 MASTER_PORT=29673 " + kHello);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("MASTER_ADDR"));
  outcome = run("env WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29673 " + kHello);
  EXPECT_THAT(outcome.output, HasSubstr("RANK"));
  outcome = run("env RANK=5 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29673 " + kHello);
  EXPECT_THAT(outcome.output, HasSubstr("rank 5"));
  outcome = run("env SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=2 "
                "MASTER_ADDR=127.0.0.1 MASTER_PORT=29673 " +
                kHello);
  EXPECT_THAT(outcome.output, HasSubstr("LOCKSTEP_SECRET_FILE"));
  outcome =
      run("env RANK=0 WORLD_SIZE=2 MASTER_ADDR=no-such-host.invalid MASTER_PORT=29673 " + kHello);
  EXPECT_EQ(outcome.exit_code, 1);
  EXPECT_THAT(outcome.output, HasSubstr("no-such-host.invalid"));
  EXPECT_THAT(outcome.output, Not(HasSubstr("terminate called")));
}

}  // namespace
}  // namespace lockstep
