// Jobs that hang on purpose: the dumps that their ranks leave behind, and the report made from
// them.
#include <filesystem>
#include <map>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/comm/world/backends.h>
#include <lockstep/comm/world/join.h>
#include <lockstep/flight/report.h>

#include "../../launch/launched.h"

namespace lockstep::comm::conformance {
namespace {

using launch::testing::Folder;
using launch::testing::Launched;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

Launched start_hanging(const std::string& scenario, int num_ranks, const Folder& flight) {
  return Launched::run(
      {"--standalone", "--grace", "1", "--nproc-per-node", std::to_string(num_ranks),
       launch::testing::this_program(), "--scenario", scenario},
      {"LOCKSTEP_FLIGHT_DIR=" + flight.path().string()});
}

std::string check_hang(const Folder& flight, std::vector<std::string> flags = {}) {
  std::vector<std::string> command = {LOCKSTEP_PROGRAM, "check", "hang", flight.path().string()};
  command.insert(command.end(), flags.begin(), flags.end());
  Launched check(command);
  EXPECT_NE(check.wait(), -1);
  return check.output() + check.error();
}

TEST(Hang, ARankThatComputesIsFoundThroughItsGroups) {
  const Folder flight;
  Launched job = start_hanging("chain", 4, flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  // The error and the report name ranks by the group's numbers and by the job's.
  EXPECT_THAT(job.output(),
              AllOf(HasSubstr("all_reduce (call #1) in group 'tp' failed: timeout of rank 1 (job "
                              "rank 3)"),
                    HasSubstr("(Ranks 0 and 1 of 'tp' are job ranks 2 and 3.)")));
  for (const std::string& text : {job.error(), check_hang(flight)})
    EXPECT_THAT(text,
                AllOf(HasSubstr("Rank 3 never called all_reduce #1 of group 'tp' (scenarios.cpp:"),
                      HasSubstr("ranks 0-2 waited for it, directly or through others, for 1."),
                      HasSubstr("Rank 3's last call, barrier #4 of group 'world' (scenarios.cpp:"),
                      HasSubstr("that it is in step 7 (forward).\n"),
                      HasSubstr("waits in exchange with rank 2 of group 'pp' (scenarios.cpp:")))
        << text;
}

TEST(Hang, ARunningJobCanBeAsked) {
  const Folder flight;
  Launched job = start_hanging("chain-now", 4, flight);
  ASSERT_TRUE(job.says("[3] computing"));
  // The other ranks make their calls within a moment.
  std::string text;
  launch::testing::eventually(milliseconds(20'000), [&] {
    text = check_hang(flight, {"--now"});
    return text.find("ranks 0-2 wait for it, directly or through others") != std::string::npos;
  });
  EXPECT_THAT(text, HasSubstr("Rank 3 never called all_reduce #1 of group 'tp' (scenarios.cpp:"));
  // A signal asks for a dump, too.
  job.kill(SIGUSR1);
  EXPECT_TRUE(launch::testing::eventually(milliseconds(60'000), [&] {
    return job.error().find("where the ranks of this host are:\nRank 3 never called") !=
               std::string::npos ||
           job.error().find("this may be a job at work.\nRank 3 never called") != std::string::npos;
  })) << job.error();
  EXPECT_FALSE(job.alive().empty());
  job.kill(SIGTERM);
  job.wait();
}

// Ranks that wait for each other in different groups are told so while they wait, with every
// backend and every launcher, but not while one of them is only slow.
void expect_circle_found(Launched& job, const std::string& backend) {
  SCOPED_TRACE(backend);
  EXPECT_NE(job.wait(milliseconds(50'000)), -1) << job.output() << job.error();
  EXPECT_EQ(launch::testing::count_of("in step\n", job.output()), 3) << job.output();
  const std::regex told("ended by all_reduce \\(call #[0-9]+\\) in group 'pair [0-2]' failed: "
                        "mismatch of ranks 0 and 1.*"
                        "rank 0 waits in all_reduce #[0-9]+ \\(sum of 1000 float32\\) of group "
                        "'pair 0' \\(scenarios.cpp:[0-9]+\\) for rank 1; "
                        "rank 1 waits in all_reduce #[0-9]+ .* of group 'pair 1' .* for rank 2; "
                        "rank 2 waits in all_reduce #[0-9]+ .* of group 'pair 2' .* for rank 0\\.");
  int num_told = 0;
  for (const std::string& line : launch::testing::lines_of(job.output()))
    if (std::regex_search(line, told)) ++num_told;
  EXPECT_EQ(num_told, 3) << job.output() << job.error();
}

TEST(Hang, ACircleIsFoundWhileRanksWait) {
  const Folder flight;
  std::map<std::string, Launched> jobs;  // they mostly wait, so all run at once
  for (const std::string& backend : available_backends())
    if (backend == "auto" || backend == "tcp" || backend == "gloo")
      jobs.emplace(backend, start_hanging("circle-" + backend, 3, flight));
  if (!std::string(LOCKSTEP_MPIRUN).empty())
    for (const std::string backend : {"auto", "mpi"})
      jobs.emplace(backend + " under mpirun",
                   Launched({LOCKSTEP_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "3",
                             launch::testing::this_program(), "--scenario", "circle-" + backend},
                            {"OMPI_MCA_btl_vader_single_copy_mechanism=none"}));
  for (auto& [name, job] : jobs) expect_circle_found(job, name);
}

TEST(Hang, ARankThatHasEndedIsNoCircle) {
  const Folder flight;
  Launched job = start_hanging("early", 3, flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  EXPECT_THAT(job.output(), HasSubstr("has left the group in good order without making this call"));
  EXPECT_THAT(job.output(), ::testing::Not(HasSubstr("wait for each other")));
}

TEST(Hang, AStoppedRankLeavesNoDump) {
  const Folder flight;
  Launched job = start_hanging("stop", 3, flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  EXPECT_THAT(job.output(), HasSubstr("No answer from rank 1: stopped, or unreachable."));
  EXPECT_THAT(job.error(), HasSubstr("Rank 1 left no dump: it is stopped or dead, or on a host "
                                     "whose dumps are not here; ranks 0 and 2 waited for it in "
                                     "all_reduce #3 of group 'world' (scenarios.cpp:"));
  EXPECT_TRUE(job.all_gone(milliseconds(60'000)));
}

TEST(Hang, WhoThrewIsNamedThoughTheOthersEndFirst) {
  const Folder flight;
  Launched job = start_hanging("throw", 3, flight);
  EXPECT_EQ(job.wait(), 3) << job.output() << job.error();
  EXPECT_THAT(job.error(), AllOf(HasSubstr("lockstep: the job failed: rank 2 ("),
                                 HasSubstr("last lines of rank 2:\n  | ended by a mistake of one "
                                           "rank\n"),
                                 // Its dump may be from before or after its end.
                                 AnyOf(HasSubstr("Rank 2 is gone; "),
                                       HasSubstr("Rank 2 never called all_reduce #3"))))
      << job.output();
}

TEST(Hang, ADeadRankIsCalledDead) {
  const Folder flight;
  Launched job = start_hanging("die", 3, flight);
  EXPECT_EQ(job.wait(), 137) << job.output() << job.error();
  EXPECT_THAT(check_hang(flight),
              AllOf(HasSubstr("Rank 2 is gone; ranks 0 and 1 waited for it in "),
                    HasSubstr("all_reduce #"), HasSubstr("and gave up.\n")));
}

// One rank runs at half speed: every rank names it within 20 steps.
TEST(Hang, ASlowRankIsNamed) {
  const Folder flight;
  Launched job = start_hanging("slow", 3, flight);
  EXPECT_EQ(job.wait(), 0) << job.output() << job.error();
  for (const std::string rank : {"[0] ", "[1] ", "[2] "}) {
    EXPECT_THAT(job.output(), HasSubstr(rank + "rank 1 is slow: its own part of a step takes 0."))
        << job.output();
    EXPECT_THAT(job.output(), ::testing::Not(HasSubstr(rank + "rank 0 is slow")));
  }
}

// Every rank writes a dump, whichever rank found the fault.
TEST(Hang, EveryRankLeavesADump) {
  for (const std::string scenario : {"behind", "mismatch", "abort"}) {
    const Folder flight;
    Launched job = start_hanging(scenario, 3, flight);
    EXPECT_EQ(job.wait(), 3) << scenario << job.output() << job.error();
    EXPECT_EQ(flight::list_dumps(flight.path()).size(), 3u) << scenario;
    EXPECT_THAT(job.error(), HasSubstr("group 'world' (3 ranks)")) << scenario;
    if (scenario == "mismatch") {
      EXPECT_THAT(job.error(), HasSubstr("Ranks made different calls as #2 of group 'world': rank "
                                         "0 called broadcast #2"));
    } else if (scenario == "abort") {
      EXPECT_THAT(check_hang(flight), HasSubstr("the loss is not a number"));
    } else {
      EXPECT_THAT(check_hang(flight), HasSubstr("Rank 1 came to all_reduce #3 of group 'world'"));
    }
  }
}

}  // namespace
}  // namespace lockstep::comm::conformance
