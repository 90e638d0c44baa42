// A process that has no descriptors left.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <thread>

#include <gtest/gtest.h>

#include <lockstep/net/socket.h>

#include "processes.h"

namespace lockstep::comm::faults {
namespace {

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

int count(const std::string& text, const std::string& word) {
  int found = 0;
  for (auto at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++found;
  return found;
}

// Meanwhile connections wait in the kernel's queue, and no thread spins over them.
TEST(Descriptors, NoneLeft) {
#ifdef LOCKSTEP_SANITIZED
  GTEST_SKIP() << "the undefined-behaviour sanitizer needs descriptors of its own";
#endif
  Job job(1, {}, [](Rank& rank) {
    int log[2];
    LOCKSTEP_CHECK(::pipe2(log, O_CLOEXEC | O_NONBLOCK) == 0);
    ::dup2(log[1], 2);
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = 256;
    LOCKSTEP_CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    std::vector<net::Fd> taken;
    for (int fd = ::dup(0); fd >= 0; fd = ::dup(0)) taken.emplace_back(fd);
    rank.say("full");
    rank.hear("measure");
    const double before = cpu_seconds();
    std::this_thread::sleep_for(milliseconds(1000));
    const double used = cpu_seconds() - before;
    rank.say(used < 0.3 ? "idle" : fmt::format("used {} s", used));
    taken.clear();
    rank.hear("end");
    std::string said(65536, '\0');
    const auto got = ::read(log[0], said.data(), said.size());
    said.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    for (char& character : said)
      if (character == '\n') character = ' ';
    rank.say("log " + said);
  });
  ASSERT_TRUE(job.says(0, "full"));
  const Deadline deadline = Deadline::after(milliseconds(20'000));
  const Endpoint other("127.0.0.1", job.secret());
  std::vector<std::thread> knocking;
  for (const Medium medium : {Medium::tcp, Medium::shared_memory}) {
    knocking.emplace_back([&, medium] {
      const int from = medium == Medium::tcp ? 0 : 1;
      try {
        EXPECT_TRUE(other.connect(job.address(0), "another group", from, medium, deadline));
      } catch (const CommError& error) {
        ADD_FAILURE() << error.what();
      }
    });
  }
  std::this_thread::sleep_for(milliseconds(50));
  job.tell(0, "measure");
  EXPECT_TRUE(job.says(0, "idle"));
  for (std::thread& thread : knocking) thread.join();
  job.tell(0, "end");
  const Outcome outcome = job.outcome(0);
  EXPECT_TRUE(outcome.finished) << outcome.text << outcome.said;
  EXPECT_EQ(count(outcome.said, "ulimit -n"), 1) << outcome.said;
}

}  // namespace
}  // namespace lockstep::comm::faults
