// What users see of ranks' output.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <sstream>

#include <lockstep/elastic/output.h>

#include "launched.h"

namespace lockstep::elastic::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Output, LinesAreWholeAndNoneIsLost) {
  constexpr int kLines = 20'000;
  // Each rank writes as fast as it can and ends at once.
  Launched job = Launched::run({"--nproc-per-node", "4", "awk",
                                "BEGIN { for (i = 0; i < 20000; ++i) print ENVIRON[\"RANK\"] "
                                "\"-abcdefghijklmnopqrstuvwxyz-\" i }"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  std::map<char, int> next;
  for (const std::string& line : lines_of(job.output())) {
    const char rank = line[1];
    const std::string expected = std::string("[") + rank + "] " + rank +
                                 "-abcdefghijklmnopqrstuvwxyz-" + std::to_string(next[rank]++);
    ASSERT_EQ(line, expected);
  }
  for (const char rank : {'0', '1', '2', '3'}) EXPECT_EQ(next[rank], kLines) << rank;
}

TEST(Output, KeepsStreamsApartAndCompletesTheLastLine) {
  Launched job = Launched::run({"sh", "-c", "printf to-output; printf to-error >&2"});
  ASSERT_EQ(job.wait(), 0);
  EXPECT_EQ(job.output(), "[0] to-output\n");
  EXPECT_EQ(job.error(), "[0] to-error\n");
}

TEST(Output, AlignsPrefixes) {
  Launched job = Launched::run({"--nproc-per-node", "11", "sh", "-c", "echo x"});
  ASSERT_EQ(job.wait(), 0);
  EXPECT_THAT(job.output(), HasSubstr("[ 3] x\n"));
  EXPECT_THAT(job.output(), HasSubstr("[10] x\n"));
  EXPECT_EQ(line_prefix(3, 11, true), "\x1b[35m[ 3]\x1b[0m ");
}

TEST(Output, PassesAnyBytes) {
  Launched job = Launched::run({"printf", "\\000\\377\\001\\r[x]\\n"});
  ASSERT_EQ(job.wait(), 0);
  EXPECT_EQ(job.output(), std::string("[0] \0\377\001\r[x]\n", 12));
}

TEST(Output, CutsLinesThatWouldFillMemory) {
  Launched job =
      Launched::run({"sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo end"});
  ASSERT_EQ(job.wait(), 0);
  std::size_t bytes = 0;
  const auto lines = lines_of(job.output());
  for (const std::string& line : lines) {
    ASSERT_EQ(line.substr(0, 4), "[0] ");
    EXPECT_LE(line.size(), RankStream::kLongestLine + (64 << 10) + 4);
    bytes += static_cast<std::size_t>(std::count(line.begin(), line.end(), 'x'));
  }
  EXPECT_EQ(bytes, 5'000'000u);
  EXPECT_EQ(lines.back(), "[0] end");
}

TEST(Output, AReaderThatLeavesDoesNotEndTheJob) {
  const Folder folder;
  Launched job({"bash", "-c",
                std::string("set -o pipefail; ") + LOCKSTEP_PROGRAM +
                    " run sh -c 'seq 100000; echo done > " + (folder.path() / "done").string() +
                    "' | head -n 1"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(job.output(), "[0] 1\n");
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "done"));
  EXPECT_THAT(job.error(), HasSubstr("nobody reads the standard output"));
}

TEST(Output, AFullDiskIsNamedAndFails) {
  const Folder folder;
  const std::string ended = (folder.path() / "ended").string();
  for (const std::string& verb :
       {"run sh -c 'seq 1000; touch " + ended + "'", std::string("--help"),
        std::string("train --help"), std::string("--version")}) {
    Launched job({"sh", "-c", LOCKSTEP_PROGRAM " " + verb + " > /dev/full"});
    EXPECT_EQ(job.wait(), 1) << verb;
    EXPECT_THAT(job.error(), HasSubstr("standard output cannot be written: "));
    EXPECT_THAT(job.error(), HasSubstr("No space left on device"));
  }
  EXPECT_TRUE(std::filesystem::exists(ended)) << "the job itself goes on";
}

TEST(Output, AReaderThatSleepsDoesNotHoldUpAFailure) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  Launched job({"bash", "-c",
                std::string("exec ") + LOCKSTEP_PROGRAM +
                    " run --nproc-per-node 2 sh -c 'if [ $RANK = 1 ]; then sleep 0.3; exit 5; fi; "
                    "exec yes' > /proc/" +
                    std::to_string(::getpid()) + "/fd/" + std::to_string(ends[1])});
  EXPECT_EQ(job.wait(milliseconds(10'000)), 5) << job.error();
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(Output, DumpsOfAJobThatSucceedsAreNamed) {
  const Folder folder;
  Launched job({LOCKSTEP_PROGRAM, "run", "sh", "-c", "touch $LOCKSTEP_FLIGHT_DIR/flight-x.json"},
               {"TMPDIR=" + folder.path().string()});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(lines_of(job.error()),
              ElementsAre(HasSubstr("dumps of the flight recorder are in " +
                                    (folder.path() / "lockstep-flight-").string())));
}

TEST(Output, GoesToLogFiles) {
  const Folder folder;
  Launched job = Launched::run({"--nproc-per-node", "2", "--log-dir", folder.path().string(),
                                "--rdzv-id", "a/b", "--redirects", "2", "--tee", "0:1", "sh", "-c",
                                "echo out $RANK; echo err $RANK >&2"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_THAT(job.output(), HasSubstr("[0] out 0\n"));
  EXPECT_THAT(job.output(), HasSubstr("[1] out 1\n"));
  EXPECT_THAT(lines_of(job.error()),
              ElementsAre(HasSubstr("output of the ranks goes to " + folder.path().string())));
  std::map<std::string, std::string> files;
  std::filesystem::path run;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) run = entry.path();
  EXPECT_THAT(run.filename().string(), ::testing::StartsWith("a_b_"));
  for (const char* name : {"0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"}) {
    std::ifstream file(run / "attempt_0" / name);
    std::ostringstream text;
    text << file.rdbuf();
    files[name] = file ? text.str() : "absent";
  }
  EXPECT_EQ(files["0/stdout.log"], "out 0\n");
  EXPECT_EQ(files["0/stderr.log"], "err 0\n");
  EXPECT_EQ(files["1/stdout.log"], "absent");
  EXPECT_EQ(files["1/stderr.log"], "err 1\n");
}

TEST(Output, TailKeepsTheLastLinesInBoundedMemory) {
  Tail tail;
  EXPECT_TRUE(tail.lines(3).empty());
  for (int i = 0; i < 100'000; ++i) tail.append("line " + std::to_string(i) + "\n");
  EXPECT_THAT(tail.lines(3), ElementsAre("line 99997", "line 99998", "line 99999"));
  EXPECT_LT(tail.lines(1'000'000).size(), 3000u);
}

TEST(Output, ClosedStreamsAreNobodysPipes) {
  for (const char* closed : {">&-", "2>&-", "<&-", "<&- >&- 2>&-"}) {
    Launched job({"sh", "-c",
                  std::string("exec ") + LOCKSTEP_PROGRAM +
                      " run --nproc-per-node 2 sh -c 'echo to-output' " + closed});
    EXPECT_EQ(job.wait(milliseconds(10'000)), 0) << closed;
    EXPECT_TRUE(job.all_gone(milliseconds(2000))) << closed;
  }
}

}  // namespace
}  // namespace lockstep::elastic::testing
