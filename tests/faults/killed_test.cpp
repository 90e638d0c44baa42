// Rows 1 to 3: processes that are killed.
#include <signal.h>

#include <map>

#include <gmock/gmock.h>

#include "disturbed.h"
#include "tests/base/files.h"

namespace lockstep::faults {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A busy machine gets two more attempts; kNeverBeyond is a bound that no load excuses.
constexpr int kAttempts = 3;
constexpr double kNeverBeyond = 120;
constexpr double kNoticed = 2;  // of which a machine with time takes a tenth

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Times {
  // from the death until a rank in a call with the victim had named it
  double noticed = kNeverBeyond;
  double resumed = kNeverBeyond;  // from the death until the next step
  double started = 0;             // from the command to the first step of all ranks, for comparison
};

class Row01KilledRank : public DisturbedTraining {
 protected:
  Job job() const { return {.launcher = {"--max-restarts", "1"}, .rank = {"--pace", "10"}}; }

  // Runs the job, in which rank 1 dies once, and checks everything but the times.
  Times disturb(Job job, const std::string& name) {
    const std::int64_t began = now_ns();
    Launched launched = start(job, name);
    EXPECT_EQ(launched.wait(milliseconds(180'000)), 0) << launched.output() << launched.error();
    expect_nothing_left(launched);
    const auto fault = only_fault(launched);
    EXPECT_EQ(fault["kind"], "signal");
    EXPECT_EQ(fault["rank"], 1);
    EXPECT_EQ(fault["signal"], "SIGKILL");
    EXPECT_EQ(fault["exit_code"], 128 + SIGKILL);
    EXPECT_EQ(fault["restarted"], true);
    expect_undisturbed_result(job.num_ranks, {}, name);
    Times all = times(name);
    all.started = static_cast<double>(first("step", name).at_ns - began) / 1e9;
    return all;
  }

  Times times(const std::string& name) const {
    Times times;
    Event death;
    for (const Event& event : events(name)) {
      if (event.kind == "dies") death = event;
      if (death.kind.empty()) continue;
      if (event.kind == "failed") {
        // A rank that stays may hear of the death from its launcher first, and then abort its own
        // calls.
        EXPECT_TRUE(event.values == std::vector{1} || event.values == std::vector{event.rank})
            << event.text << " of rank " << event.rank;
        times.noticed = std::min(times.noticed, seconds_between(death, event));
      }
      if (event.kind == "step" && event.generation > 0) {
        times.resumed = seconds_between(death, event);
        break;
      }
    }
    return times;
  }

  void expect_times(Job job) {
    Times best;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      const Times times = disturb(job, "run" + std::to_string(attempt));
      EXPECT_LT(times.resumed, kNeverBeyond);
      best.noticed = std::min(best.noticed, times.noticed);
      std::printf("noticed after %.3f s, the next step after %.2f s (the first one came %.2f s "
                  "after the start)\n",
                  times.noticed, times.resumed, times.started);
      // If a job takes longer than usual to start, a restart takes longer, too.
      const double excused = std::max(0.0, times.started - 2);
      best.resumed = std::min(best.resumed, times.resumed - excused);
      if (HasFailure() || (best.noticed <= kNoticed && best.resumed <= 5)) break;
    }
    EXPECT_LE(best.noticed, kNoticed);
    EXPECT_LE(best.resumed, 5);
  }

  Job dying_in(const std::string& place) const {
    Job dying = job();
    dying.rank.insert(dying.rank.end(), {"--fault", place, "--rank", "1", "--step", "7"});
    return dying;
  }
};

TEST_F(Row01KilledRank, InForward) { expect_times(dying_in("forward")); }
TEST_F(Row01KilledRank, InBackward) { expect_times(dying_in("backward")); }
TEST_F(Row01KilledRank, InsideACollective) {
  Job dying = dying_in("collective");
  dying.num_ranks = 3;  // one dies in the call, one is in it, too, and one comes late
  expect_times(dying);
}

// The rank dies in the middle of its part of a checkpoint, which the others then cannot complete.
TEST_F(Row01KilledRank, DuringASave) {
  Job dying = job();
  dying.variables =
      with_shim({"SHIM_IO=KILL", "SHIM_IO_PATH=checkpoints", "SHIM_IO_RANK=1", "SHIM_IO_CALL=3",
                 "SHIM_IO_LOG=" + (files_.folder() / "calls").string()});
  disturb(dying, "run");
}

// Every step is copied to another rank, and there is no checkpoint before the end.
TEST_F(Row01KilledRank, WithStateInMemoryOneStepIsRepeatedAtMost) {
  for (const std::string place : {"forward", "backward", "collective"}) {
    SCOPED_TRACE(place);
    Job dying = dying_in(place);
    dying.num_ranks = 3;
    dying.rank.insert(dying.rank.end(), {"--copies", "1", "--interval", "0"});
    const Times times = disturb(dying, place);
    std::printf("killed in %s: the next step after %.2f s\n", place.c_str(), times.resumed);
    expect_within(5, times.resumed, place);
    for (const Event& event : events(place))
      if (event.kind == "step" && event.generation > 0) {
        EXPECT_GE(event.step, 6) << event.text;
      }
  }
}

// The replacement dies, too, while the other ranks are on their way into the next generation.
TEST_F(Row01KilledRank, WhileTheJobIsFormedAnew) {
  Job dying = dying_in("backward");
  dying.num_ranks = 3;
  dying.launcher = {"--max-restarts", "2"};
  dying.rank.insert(dying.rank.end(), {"--copies", "1", "--interval", "0", "--again", "1"});
  Launched launched = start(dying);
  EXPECT_EQ(launched.wait(milliseconds(180'000)), 0) << launched.output() << launched.error();
  expect_nothing_left(launched);
  EXPECT_EQ(launch::testing::faults_in(launched.error()).size(), 2u) << launched.error();
  EXPECT_THAT(launched.error(), Not(HasSubstr("did not leave")));
  for (const Event& event : events())
    if (event.kind == "step" && event.generation > 0) {
      EXPECT_GE(event.step, 6) << event.text;
    }
  expect_undisturbed_result(3);
}

// Without a restart left, the job ends with the exit code of the first rank that failed.
TEST_F(Row01KilledRank, WithoutARestartTheJobEnds) {
  Job dying = dying_in("backward");
  dying.launcher = {};
  Launched launched = start(dying);
  EXPECT_EQ(launched.wait(milliseconds(180'000)), 128 + SIGKILL) << launched.error();
  expect_nothing_left(launched);
  const auto fault = only_fault(launched);
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["restarted"], false);
  EXPECT_EQ(first("failed").values, std::vector<int>{1});
}

// Three hosts train. A fourth waits to take the place of a lost host, so that the job goes on with
// as many ranks.
class LostHost : public DisturbedHosts {
 protected:
  Job job() const {
    return {.num_ranks = 1,
            .launcher = {"--nnodes", "3", "--max-restarts", "3"},
            .rank = {"--pace", "50", "--epochs", "4"}};
  }

  // Starts all hosts; returns when three train and host 3 waits.
  void start_all() {
    for (int host = 0; host < 3; ++host) hosts_.push_back(start_on(host, job()));
    ASSERT_TRUE(reaches(1)) << hosts_[0].error();
    hosts_.push_back(start_on(3, job()));
    ASSERT_TRUE(launch::testing::eventually(milliseconds(60'000), [&] {
      return hosts_[3].error().find("waits to take the place") != std::string::npos;
    })) << hosts_[3].error();
    ASSERT_TRUE(reaches(6));
  }

  // Expects that all hosts but `lost` end well and report the loss. Host 3 may only be asked to
  // join.
  void expect_gone_on_without(int lost) {
    for (int host = 0; host < 4; ++host) {
      if (host == lost) continue;
      Launched& launched = hosts_[static_cast<std::size_t>(host)];
      EXPECT_EQ(launched.wait(milliseconds(180'000)), 0) << host << launched.error();
      expect_nothing_left(launched);
      if (host == 3) continue;  // it was not there when it happened
      const auto fault = only_fault(launched);
      EXPECT_EQ(fault["kind"], "node_lost");
      EXPECT_EQ(fault["host"], "host" + std::to_string(lost));
      EXPECT_EQ(fault["restarted"], true);
    }
    expect_undisturbed_result(3, {"--epochs", "4"});
  }

  double seconds_until_resumed(std::int64_t from_ns) const {
    for (const Event& event : events())
      if (event.kind == "step" && event.generation > 0)
        return static_cast<double>(event.at_ns - from_ns) / 1e9;
    return kNeverBeyond;
  }

  std::vector<Launched> hosts_;
};

using Row02KilledAgent = LostHost;
using Row03KilledRendezvousHost = LostHost;

TEST_F(Row02KilledAgent, ItsRanksDieAndTheOthersReForm) {
  HOSTS_OR_SKIP(4);
  start_all();
  if (HasFailure()) return;
  const std::int64_t killed = now_ns();
  hosts_[2].kill(SIGKILL);
  EXPECT_TRUE(hosts_[2].all_gone(milliseconds(60'000)));
  const double ranks_died = static_cast<double>(now_ns() - killed) / 1e9;
  expect_gone_on_without(2);
  std::printf("its ranks were gone after %.2f s, the next step came after %.2f s\n", ranks_died,
              seconds_until_resumed(killed));
  expect_within(1, ranks_died);
  expect_within(5, seconds_until_resumed(killed));
}

TEST_F(Row03KilledRendezvousHost, AStandbyTakesOver) {
  HOSTS_OR_SKIP(4);
  start_all();
  if (HasFailure()) return;
  const std::int64_t killed = now_ns();
  hosts_[0].kill(SIGKILL);
  expect_gone_on_without(0);
  std::printf("the next step came after %.2f s\n", seconds_until_resumed(killed));
  expect_within(5, seconds_until_resumed(killed));
}

using Row03FrozenRendezvousHost = LostHost;

std::map<std::string, std::string> files_in(const std::filesystem::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file())
      files[entry.path().string()] = lockstep::testing::read_file(entry.path());
  return files;
}

// The lost host's main rank still has the run's folder open, with all of its locks.
TEST_F(Row03FrozenRendezvousHost, TheOthersTakeItsFolderOverAndItChangesNothing) {
  HOSTS_OR_SKIP(4);
  start_all();
  if (HasFailure()) return;
  const std::int64_t frozen = now_ns();
  const std::vector<pid_t> processes = hosts_[0].alive();
  ASSERT_GE(processes.size(), 2u) << "a launcher and its rank";
  for (const pid_t process : processes) ::kill(process, SIGSTOP);
  expect_gone_on_without(0);
  std::printf("the next step came after %.2f s\n", seconds_until_resumed(frozen));
  expect_within(10, seconds_until_resumed(frozen));
  const auto before = files_in(output());
  for (const pid_t process : processes) ::kill(process, SIGCONT);
  EXPECT_NE(hosts_[0].wait(milliseconds(180'000)), 0) << "it is not told that all is well";
  expect_nothing_left(hosts_[0]);
  const auto after = files_in(output());
  for (const auto& [path, text] : before) {
    const auto now = after.find(path);
    EXPECT_TRUE(now != after.end()) << "the one that woke up has removed " << path;
    if (now != after.end())
      EXPECT_TRUE(now->second == text) << "the one that woke up has written to " << path;
  }
  for (const auto& [path, text] : after)
    EXPECT_TRUE(before.contains(path)) << "the one that woke up has made " << path;
}

}  // namespace
}  // namespace lockstep::faults
