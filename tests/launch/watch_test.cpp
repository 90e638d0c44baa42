// Ranks that exist but make no progress: stopped and stuck ones are named, and replaced if the user
// allows it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include <lockstep/launch/processes/rank_watch.h>
#include <lockstep/launch/rank_side/progress_page.h>
#include <lockstep/net/fd.h>

#include "launched.h"

namespace lockstep::launch::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// The number after `label` in the text; 0 if there is none.
int number_after(const std::string& label, const std::string& text) {
  const auto at = text.find(label);
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + label.size());
}

bool tells(const Launched& job, const std::string& text) {
  return eventually(milliseconds(60'000),
                    [&] { return job.error().find(text) != std::string::npos; });
}

// Ctrl-Z stops the launcher and its ranks; none of the ranks counts as stopped or stuck because of
// it.
TEST(Watch, AllStandStillWithTheLauncherAndGoOnWithIt) {
  const Folder folder;
  const std::string end = (folder.path() / "end").string();
  // The ranks have no children: a shell that is just starting one (vfork) waits for it in a state
  // that is not "stopped", and waits forever if the child was stopped first.
  Launched job = Launched::run({"--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c",
                                "echo runs; until [ -e " + end + " ]; do :; done"});
  ASSERT_TRUE(job.says("[0] runs") && job.says("[1] runs"));
  for (int i = 0; i < 2; ++i) {
    job.kill(SIGTSTP);
    EXPECT_TRUE(job.stopped()) << i;
    job.kill(SIGCONT);
    EXPECT_TRUE(eventually(milliseconds(60'000), [&] { return !job.stopped(milliseconds(0)); }));
  }
  folder.write("end", "");
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(job.error(), "");
}

TEST(Watch, AStoppedRankIsNamedAndMayGoOn) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "sh", "-c",
                     "[ $RANK = 1 ] && { echo pid $$ stops; kill -STOP $$; }; echo ends"});
  ASSERT_TRUE(job.says("[1] pid ")) << job.error();
  ASSERT_TRUE(tells(job, "is stopped, by SIGSTOP or a terminal")) << job.error();
  const int pid = number_after("[1] pid ", job.output());
  EXPECT_THAT(job.error(), HasSubstr("rank 1 (pid " + std::to_string(pid) + ") is stopped"));
  EXPECT_THAT(job.error(), HasSubstr("'kill -CONT " + std::to_string(pid) + "'"));
  ASSERT_GT(pid, 0);
  ::kill(pid, SIGCONT);
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(count_of("is stopped", job.error()), 1);
}

TEST(Watch, AStoppedRankIsReplacedWhereRestartsAreLeft) {
  Launched job =
      Launched::run({"--nproc-per-node", "2", "--max-restarts", "1", "sh", "-c",
                     "[ $LOCKSTEP_GENERATION = 1 ] && exit 0; echo pid $$; [ $RANK = 1 ] "
                     "&& kill -STOP $$; exec sleep 100"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(1)) << job.error();
  const auto fault = nlohmann::json::parse(faults[0]);
  EXPECT_EQ(fault["kind"], "stopped");
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["restarted"], true);
  // It cannot be woken up any more, because it is gone.
  EXPECT_NE(::kill(number_after("[1] pid ", job.output()), 0), 0);
}

TEST(Watch, SaysWhomItWaitsForAfterAFailure) {
  Launched job = Launched::run({"--nproc-per-node", "3", "--grace", "3", "sh", "-c",
                                "case $RANK in 0) exit 3;; 1) echo pid $$; kill -STOP $$;; 2) trap "
                                "'' TERM; while :; do sleep "
                                "0.05; done;; esac"});
  EXPECT_EQ(job.wait(), 3) << job.error();
  const std::string pid = std::to_string(number_after("[1] pid ", job.output()));
  EXPECT_THAT(job.error(), HasSubstr("waiting up to "));
  EXPECT_THAT(job.error(),
              HasSubstr(" for rank 1 (pid " + pid + "), which is stopped ('kill -CONT " + pid +
                        "' lets it go on), rank 2 (pid "));
  EXPECT_TRUE(job.all_gone(milliseconds(0)));
}

TEST(Watch, AStuckRankHasFailed) {
  Launched job = Launched::run({"--nproc-per-node", "2", "--max-restarts", "1", "--stuck-after",
                                "1.5", RANK_PROGRAM, "progress"});
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.error(), HasSubstr("is stuck: no progress for "));
  const auto faults = faults_in(job.error());
  ASSERT_THAT(faults, SizeIs(1)) << job.error();
  const auto fault = nlohmann::json::parse(faults[0]);
  EXPECT_EQ(fault["kind"], "stuck");
  EXPECT_EQ(fault["rank"], 1);
  EXPECT_EQ(fault["step"], 6);
  EXPECT_EQ(fault["restarted"], true);
}

TEST(Watch, WhoReportsNothingIsNotStuck) {
  Launched job = Launched::run({"--stuck-after", "0.1", "sleep", "1"});
  EXPECT_EQ(job.wait(), 0) << job.error();
}

TEST(Watch, TheOneFurthestBehindComesFirst) {
  ProgressPage page(4);
  RankWatch watch(4, page, milliseconds(10'000));
  const std::vector<int> pids = {::getpid(), ::getpid(), ::getpid(), ::getpid()};
  auto now = Clock::now();
  for (const int rank : {0, 1, 2}) page.report(rank, 7);  // rank 3 reports nothing
  EXPECT_THAT(watch.look(pids, now), IsEmpty());
  now += milliseconds(9000);
  page.report(0, 8);
  page.report(2, 6);  // any change of the number is progress, even a smaller one
  EXPECT_THAT(watch.look(pids, now), IsEmpty());
  now += milliseconds(9000);
  auto found = watch.look(pids, now);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].kind, RankWatch::Finding::Kind::stuck);
  EXPECT_EQ(found[0].local_rank, 1);
  EXPECT_EQ(found[0].step, 7u);
  EXPECT_EQ(found[0].still_for, milliseconds(18'000));
  EXPECT_THAT(watch.look(pids, now + RankWatch::kBetweenLooks / 2), IsEmpty()) << "too soon";
  now += milliseconds(9000);
  found = watch.look(pids, now);
  ASSERT_THAT(found, SizeIs(3));
  EXPECT_EQ(found[0].local_rank, 2);
  EXPECT_EQ(found[1].local_rank, 1);
  EXPECT_EQ(found[2].local_rank, 0);
  now += std::chrono::hours(1);  // they were stopped on purpose for this hour
  watch.resume(now);
  EXPECT_THAT(watch.look(pids, now + milliseconds(9000)), IsEmpty());
  found = watch.look({0, 0, 0, ::getpid()}, now + milliseconds(9000));
  EXPECT_THAT(found, IsEmpty()) << "those that have ended are not stuck";
}

TEST(Watch, APageIsOnlyTakenForWhatItIs) {
  ProgressPage page(2);
  page.report(1, 41);
  const auto same = ProgressPage::inherited(page.descriptor(), 1);
  ASSERT_TRUE(same);
  EXPECT_EQ(same->step(1), 41u);
  EXPECT_EQ(same->step(0), std::nullopt);
  same->report(0, 0);
  EXPECT_EQ(page.step(0), 0u);
  page.clear();
  EXPECT_EQ(same->step(1), std::nullopt);

  EXPECT_FALSE(ProgressPage::inherited(page.descriptor(), 2)) << "no slot for that rank";
  EXPECT_FALSE(ProgressPage::inherited(-1, 0));
  const net::Fd other(::memfd_create("other", MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(other.get(), 4096), 0);
  EXPECT_FALSE(ProgressPage::inherited(other.get(), 0)) << "its size may change";
  EXPECT_NE(::ftruncate(page.descriptor(), 0), 0) << "no rank can cut it under the launcher";
}

TEST(Watch, AProcessOnItsWayOutIsKnown) {
  EXPECT_FALSE(state_of(::getpid()).ending());
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  EXPECT_TRUE(eventually(milliseconds(60'000), [&] { return state_of(child).ending(); }));
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(state_of(child).ending()) << "it is gone";
}

}  // namespace
}  // namespace lockstep::launch::testing
