// A training that is disturbed, and the properties that must hold afterwards, whatever the
// disturbance was.
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
  std::int64_t at_ns = 0;   // on a clock of the host that never jumps
  std::int64_t step = -1;   // only for the kinds step and ended
  std::vector<int> values;  // samples of a step, or ranks of a failure
  std::string text;         // the whole line
};

struct Job {
  int num_ranks = 2;
  Words launcher = {};   // flags of `lockstep run`
  Words rank = {};       // flags of the ranks' program
  Words variables = {};  // environment variables
};

// The results of a run.
struct Result {
  std::string weights;           // with the weights' names
  std::map<int, double> losses;  // by step
};

// Jobs that all run the same small training. Each run has a name.
class DisturbedTraining : public ::testing::Test {
 protected:
  DisturbedTraining();

  Launched start(const Job& job, const std::string& name = "run");

  // Flags and variables that every job has.
  Words ranks_words(const Job& job, const std::string& name);
  Words variables(Words more) const;

  std::filesystem::path output(const std::string& name = "run") const {
    return files_.output(name);
  }
  std::filesystem::path checkpoints(const std::string& name = "run") const {
    return output(name) / "checkpoints";
  }

  // The events in the order in which they happened.
  std::vector<Event> events(const std::string& name = "run") const;
  // The first event of a kind; fails the test if there is none.
  Event first(const std::string& kind, const std::string& name = "run") const;
  // Waits until a rank begins that step, in that generation or a later one.
  bool reaches(std::int64_t step, int generation = 0, const std::string& name = "run") const;

  // Expects that something which is owed within this many seconds took no longer. A machine on
  // which the job took longer than usual to reach its first step gets that much more time.
  void expect_within(double owed, double seconds, const std::string& name = "run") const;

  // Expects that weights and losses are, to the bit, those of an undisturbed run on that many ranks
  // of one host, and that every sample was used once in each epoch. `rank` has the flags of the
  // training.
  void expect_undisturbed_result(int world_size, const Words& rank = {},
                                 const std::string& name = "run");
  // The result of that undisturbed run, which is trained once in this process.
  const Result& undisturbed(int world_size, const Words& rank = {});
  Result result(const std::string& name = "run") const;
  // Looks at all steps that count, which are the last attempts at each.
  void expect_each_sample_once(const std::string& name = "run") const;
  // Expects that no process of the job and no name in shared memory is left.
  void expect_nothing_left(const Launched& job) const;
  // The only machine-readable line about a failure of the job.
  nlohmann::json only_fault(const Launched& job) const;

  void note_start(const std::string& name);

  train::testing::Training files_;
  std::map<std::string, std::int64_t> started_ns_;  // when each name's first run began
};

// The same training on separate hosts, one rank each.
class DisturbedHosts : public DisturbedTraining {
 protected:
  // False if this process may not make network namespaces.
  bool connect(int num_hosts);

  // Starts a launcher with this job's flags on one of the hosts; `job.num_ranks` is the number on
  // that host.
  Launched start_on(int host, const Job& job, const std::string& name = "run");

  std::string endpoints_;  // of all hosts; host 0's comes first
  std::string secret_;
  std::unique_ptr<Network> network_;
};

#define HOSTS_OR_SKIP(size) \
  if (!connect(size)) GTEST_SKIP() << "this process may not make network namespaces"

// Variables that put the shim (shim/shim.cpp) in front of the C library.
Words with_shim(Words variables);

// The process of a job's rank; -1 if there is none.
pid_t process_of_rank(const Launched& job, int rank);

// The time from the first event to the second.
double seconds_between(const Event& first, const Event& second);

}  // namespace lockstep::faults
