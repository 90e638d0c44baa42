// The ranks' output as users see it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include <lockstep/launch/processes/output.h>

#include "launched.h"

namespace lockstep::launch::testing {
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
  EXPECT_EQ(job.output(), std::string("[0] \0\377\001\r[0] [x]\n", 16)) << "a line begun anew";
}

TEST(Output, LongLinesStayWhole) {
  for (const char* num_ranks : {"1", "2"}) {
    Launched job = Launched::run({"--nproc-per-node", num_ranks, "sh", "-c",
                                  "[ $RANK = 1 ] || head -c 5000000 /dev/zero | tr '\\0' x; echo; "
                                  "echo end $RANK"});
    ASSERT_EQ(job.wait(), 0);
    const auto lines = lines_of(job.output());
    EXPECT_EQ(lines.size(), 2u * static_cast<std::size_t>(std::stoi(num_ranks)));
    const auto longest = std::max_element(
        lines.begin(), lines.end(),
        [](const std::string& a, const std::string& b) { return a.size() < b.size(); });
    EXPECT_EQ(longest->size(), 5'000'004u);
    EXPECT_TRUE(longest->starts_with("[0] xxx"));
    EXPECT_EQ(longest->find_first_not_of('x', 4), std::string::npos);
    EXPECT_THAT(lines, ::testing::Contains("[0] end 0"));
  }
}

TEST(Output, OthersWaitForALongLineButNotForOneWithoutEnd) {
  const net::Fd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  Sink sink(nowhere.get());
  Tail tail;
  std::array<int, 2> long_pipe{}, other_pipe{};
  ASSERT_EQ(::pipe2(long_pipe.data(), O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(other_pipe.data(), O_CLOEXEC), 0);
  const net::Fd writer(long_pipe[1]), other_writer(other_pipe[1]);
  const auto held = RankStream::Incomplete::held;
  RankStream stream(net::Fd(long_pipe[0]), "[0] ", sink, held, &tail, net::Fd());
  RankStream other(net::Fd(other_pipe[0]), "[1] ", sink, held, &tail, net::Fd());

  const std::string part(60'000, 'x');
  const auto write_of_the_line = [&](std::size_t bytes) {
    for (std::size_t written = 0; written < bytes; written += part.size()) {
      ASSERT_EQ(::write(writer.get(), part.data(), part.size()), static_cast<ssize_t>(part.size()));
      ASSERT_TRUE(stream.read());
      sink.flush();
    }
  };
  EXPECT_FALSE(other.waits_for_line(Clock::now()));
  write_of_the_line(RankStream::kLongestLine);
  const auto begun = Clock::now();
  EXPECT_TRUE(other.waits_for_line(begun));
  EXPECT_FALSE(stream.waits_for_line(begun)) << "it is its own line";
  const auto too_long = begun + std::chrono::seconds(5);
  EXPECT_FALSE(other.waits_for_line(too_long)) << "it stands still";
  while (Clock::now() <= begun) std::this_thread::yield();
  write_of_the_line(1);
  EXPECT_TRUE(other.waits_for_line(too_long)) << "it has grown since";
  write_of_the_line(64 << 20);
  EXPECT_FALSE(other.waits_for_line(Clock::now())) << "it does not end";
}

// The line is longer than the launcher's buffer and the pipe together, so a part of it has been
// written when rank 0 is done with it.
TEST(Output, ALongLineThatDoesNotEndHoldsUpNobody) {
  const Folder folder;
  const auto wait_for = [&](const char* file) {
    return "until [ -e " + (folder.path() / file).string() + " ]; do sleep 0.02; done; ";
  };
  Launched job =
      Launched::run({"--nproc-per-node", "2", "sh", "-c",
                     "if [ $RANK = 0 ]; then head -c 4000000 /dev/zero | tr '\\0' x; touch " +
                         (folder.path() / "begun").string() + "; else " + wait_for("begun") +
                         "echo other; fi; " + wait_for("end") + "echo"});
  EXPECT_TRUE(job.says("x\n[1] other\n"));
  folder.write("end", "");
  EXPECT_EQ(job.wait(), 0);
}

// A person would see a progress bar and a prompt.
TEST(Output, LinesOfOneRankAreShownBeforeTheyAreComplete) {
  const Folder folder;
  const std::string end = (folder.path() / "end").string();
  Launched job =
      Launched::run({"sh", "-c",
                     "printf '\\r10%%'; until [ -e " + end +
                         " ]; do sleep 0.02; done; printf '\\r20%%\\r\\n'; printf 'more? '"});
  EXPECT_TRUE(job.says("[0] \r[0] 10%")) << job.output();
  folder.write("end", "");
  EXPECT_EQ(job.wait(), 0);
  EXPECT_EQ(job.output(), "[0] \r[0] 10%\r[0] 20%\r\n[0] more? \n");
}

// Typed text reaches only rank 0.
TEST(Output, ATerminalIsReadByRankZero) {
  const net::Fd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(master && ::grantpt(master.get()) == 0 && ::unlockpt(master.get()) == 0);
  const std::string terminal = ::ptsname(master.get());
  Launched job({"sh", "-c",
                "exec setsid -c -w " LOCKSTEP_PROGRAM
                " run --nproc-per-node 2 sh -c 'read x; echo $RANK read \"$x\"' < " +
                    terminal});
  EXPECT_TRUE(job.says("[1] 1 read \n"));
  ASSERT_EQ(::write(master.get(), "hello\n", 6), 6);
  EXPECT_EQ(job.wait(), 0) << job.error();
  EXPECT_TRUE(job.says("[0] 0 read hello\n"));
}

// The other ranks read before rank 0 does, and would take its input.
TEST(Output, PipesAndFilesAreReadByRankZero) {
  const Folder folder;
  const std::string input = folder.write("input", "one\ntwo\n");
  const std::string rank =
      folder.write("rank.sh", "cd ${0%/*}\n"
                              "if [ $RANK != 0 ]; then cat; touch read_$RANK; exit; fi\n"
                              "until [ -e read_1 ] && [ -e read_2 ]; do sleep 0.02; done\n"
                              "cat; rm read_1 read_2\n");
  const std::string run = LOCKSTEP_PROGRAM " run --nproc-per-node 3 sh " + rank;
  for (const std::string& command : {"cat " + input + " | " + run, run + " < " + input}) {
    Launched job({"sh", "-c", command});
    EXPECT_EQ(job.wait(), 0) << command << "\n" << job.error();
    EXPECT_EQ(job.output(), "[0] one\n[0] two\n") << command;
  }
}

// With several ranks and output to a file, no line is torn apart.
TEST(Output, LinesOfSeveralRanksAreHeldUntilTheyAreComplete) {
  Launched job = Launched::run({"--nproc-per-node", "2", "sh", "-c",
                                "printf begin; sleep 0.3; echo; printf '10%%\\r20%%\\n'"});
  EXPECT_EQ(job.wait(), 0);
  std::vector<std::string> lines = lines_of(job.output());
  std::sort(lines.begin(), lines.end());
  EXPECT_THAT(lines, ElementsAre("[0] 10%\r[0] 20%", "[0] begin", "[1] 10%\r[1] 20%", "[1] begin"));
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
#ifndef __SANITIZE_THREAD__  // whose build leaves the verb out
        std::string("train --help"),
#endif
        std::string("--version")}) {
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
  EXPECT_EQ(job.wait(milliseconds(60'000)), 5) << job.error();
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

// What --tee names is shown, whatever --redirects says.
TEST(Output, GoesToFilesAndIsShownWithTee) {
  const Folder folder;
  Launched job =
      Launched::run({"--nproc-per-node", "2", "--log-dir", folder.path().string(), "--redirects",
                     "3", "--tee", "1:2", "sh", "-c", "echo out $RANK; echo err $RANK >&2"});
  ASSERT_EQ(job.wait(), 0) << job.error();
  EXPECT_EQ(job.output(), "");
  EXPECT_THAT(lines_of(job.error()),
              ElementsAre(HasSubstr("output of the ranks goes to "), "[1] err 1"));
  int files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder.path()))
    files += entry.is_regular_file() && entry.file_size() == 6 ? 1 : 0;
  EXPECT_EQ(files, 4);
}

// A failure is explained from the files where the output goes to files alone, and names them.
TEST(Output, OfAFailedRankIsFoundInItsFiles) {
  for (const char* streams : {"1", "2", "3"}) {
    SCOPED_TRACE(streams);
    const Folder folder;
    Launched job = Launched::run(
        {"--nproc-per-node", "2", "--log-dir", folder.path().string(), "--redirects", streams, "sh",
         "-c", "echo before; echo the reason >&2; [ $RANK = 0 ] || exit 3; sleep 60"});
    ASSERT_EQ(job.wait(), 3) << job.error();
    EXPECT_THAT(job.error(), HasSubstr("last lines of rank 1:\n  | before\n  | the reason\n"));
    const std::string pointer = "lockstep: the output of rank 1 is in ";
    const std::string error = job.error();
    ASSERT_THAT(error, HasSubstr(pointer));
    std::istringstream line(error.substr(error.find(pointer) + pointer.size()));
    std::string file;
    int found = 0;
    for (std::string rest; line.peek() != '\n' && line >> file; found += file == "and" ? 0 : 1)
      EXPECT_TRUE(file == "and" || std::filesystem::is_regular_file(file)) << file;
    EXPECT_EQ(found, *streams == '3' ? 2 : 1) << error;
    const auto faults = faults_in(error);
    ASSERT_EQ(faults.size(), 1u);
    EXPECT_THAT(faults[0], HasSubstr("\"output_files\":[\"" + folder.path().string()));
  }
}

TEST(Output, TailShowsWhatCarriageReturnsLeftToSee) {
  Tail tail;
  tail.append("10%\r20%\r\nnext\n");
  EXPECT_THAT(tail.lines(3), ElementsAre("20%", "next"));
}

// On a terminal an incomplete line makes room for others and is then shown again.
TEST(Output, ATerminalShowsOneIncompleteLineBelowAllOthers) {
  const net::Fd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(master && ::grantpt(master.get()) == 0 && ::unlockpt(master.get()) == 0);
  const net::Fd terminal(::open(::ptsname(master.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal);
  termios raw{};
  ::tcgetattr(terminal.get(), &raw);
  ::cfmakeraw(&raw);
  ::tcsetattr(terminal.get(), TCSANOW, &raw);
  Sink sink(terminal.get());
  ASSERT_TRUE(sink.terminal());
  const auto seen = [&] {
    sink.flush();
    std::array<char, 4096> bytes;
    return std::string(bytes.data(),
                       static_cast<std::size_t>(::read(master.get(), bytes.data(), bytes.size())));
  };
  Tail tail;
  const auto stream = [&](int rank, net::Fd& writer) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    writer = net::Fd(ends[1]);
    return RankStream(net::Fd(ends[0]), "[" + std::to_string(rank) + "] ", sink,
                      RankStream::Incomplete::shown, &tail, {});
  };
  net::Fd first_end, second_end;
  RankStream first = stream(0, first_end), second = stream(1, second_end);
  const auto write = [](RankStream& to, const net::Fd& end, const std::string& text) {
    EXPECT_EQ(::write(end.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    to.read();
    to.show_incomplete(Clock::now());  // too early
    to.show_incomplete(Clock::now() + milliseconds(200));
  };
  write(first, first_end, "10%\r20%");
  EXPECT_EQ(seen(), "[0] 20%");
  write(first, first_end, "\r30%\r");
  EXPECT_EQ(seen(), "\r[0] 30%") << "the last one waits for what it begins";
  sink.append("lockstep: news\n");
  EXPECT_EQ(seen(), "\r\x1b[Klockstep: news\n[0] 30%");
  write(second, second_end, "whole\nmore? ");
  EXPECT_EQ(seen(), "\r\x1b[K[1] whole\n[1] more? ");
  write(first, first_end, "40%\n");
  EXPECT_EQ(seen(), "\r\x1b[K[0] 30%\r[0] 40%\n[1] more? ");
  second_end.reset();
  second.read();
  EXPECT_EQ(seen(), "\n");
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
    EXPECT_EQ(job.wait(), 0) << closed;
    EXPECT_TRUE(job.all_gone(milliseconds(60'000))) << closed;
  }
}

}  // namespace
}  // namespace lockstep::launch::testing
