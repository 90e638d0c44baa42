// A training that is disturbed, and what has to hold afterwards whatever the disturbance was.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/launch/network.h"
#include "tests/train/run/training.h"

namespace lockstep::faults {

using launch::testing::Launched;
using launch::testing::Network;

using Words = std::vector<std::string>;

// A line of a rank's log (rank/rank.cpp).
struct Event {
  int generation = 0;
  int rank = 0;
  std::string kind;         // step, dies, failed, stopped or ended
  std::int64_t at_ns = 0;   // on the clock of the host that never jumps
  std::int64_t step = -1;   // of kinds step and ended
  std::vector<int> values;  // samples of a step, ranks of a failure
  std::string text;         // the whole line
};

struct Job {
  int num_ranks = 2;
  Words launcher = {};   // flags of `lockstep run`
  Words rank = {};       // flags of the ranks' program
  Words variables = {};  // of the environment
};

// What a run leaves.
struct Result {
  std::string weights;           // with their names
  std::map<int, double> losses;  // of each step
};

// Jobs of the same small training. Their runs have names.
class DisturbedTraining : public ::testing::Test {
 protected:
  DisturbedTraining();

  Launched start(const Job& job, const std::string& name = "run");

  // Flags and variables of every job.
  Words ranks_words(const Job& job, const std::string& name);
  Words variables(Words more) const;

  std::filesystem::path output(const std::string& name = "run") const {
    return files_.output(name);
  }
  std::filesystem::path checkpoints(const std::string& name = "run") const {
    return output(name) / "checkpoints";
  }

  // In the order in which they happened.
  std::vector<Event> events(const std::string& name = "run") const;
  // Of that kind, the first; fails the test where there is none.
  Event first(const std::string& kind, const std::string& name = "run") const;
  // Waits until a rank begins that step, in that generation or a later one.
  bool reaches(std::int64_t step, int generation = 0, const std::string& name = "run") const;

  // What is owed within so many seconds came within them, or within what a machine is excused that
  // took longer than usual from a job's start to its first step. Fails the test otherwise.
  void expect_within(double owed, double seconds, const std::string& name = "run") const;

  // Weights and losses are, to the bit, those of a run on so many ranks of one host that nobody
  // disturbed, and every sample was used once an epoch.
  // `rank` are the flags of what is trained.
  void expect_undisturbed_result(int world_size, const Words& rank = {},
                                 const std::string& name = "run");
  // The latter's. Trains once in this process.
  const Result& undisturbed(int world_size, const Words& rank = {});
  Result result(const std::string& name = "run") const;
  // Of all steps that count: those of the last attempt at each.
  void expect_each_sample_once(const std::string& name = "run") const;
  // No process, and no name in shared memory.
  void expect_nothing_left(const Launched& job) const;
  // The one machine-readable line of its failure.
  nlohmann::json only_fault(const Launched& job) const;

  void note_start(const std::string& name);

  train::testing::Training files_;
  std::map<std::string, std::int64_t> started_ns_;  // of each name's first
};

// The same on hosts of their own, one rank each.
class DisturbedHosts : public DisturbedTraining {
 protected:
  // False where this process may not make network namespaces.
  bool connect(int num_hosts);

  // A launcher with this job's flags on one of the hosts; `job.num_ranks` are a host's.
  Launched start_on(int host, const Job& job, const std::string& name = "run");

  std::string endpoints_;  // of all hosts, host 0's first
  std::string secret_;
  std::unique_ptr<Network> network_;
};

#define HOSTS_OR_SKIP(size) \
  if (!connect(size)) GTEST_SKIP() << "this process may not make network namespaces"

// Variables that put the shim (shim/shim.cpp) in front of the C library.
Words with_shim(Words variables);

// The process of a job's rank; -1 where there is none.
pid_t process_of_rank(const Launched& job, int rank);

// From the first to the second.
double seconds_between(const Event& first, const Event& second);

}  // namespace lockstep::faults
