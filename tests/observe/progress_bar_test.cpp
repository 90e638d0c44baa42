// The bar on real terminals and pipes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <thread>

#include <lockstep/observe/progress_bar.h>

#include "../base/variables.h"
#include "screen.h"

namespace lockstep::observe {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// The output so far.
std::string read_available(int fd) {
  std::string text;
  char buffer[4096];
  for (pollfd ready{.fd = fd, .events = POLLIN, .revents = 0};
       ::poll(&ready, 1, 20) > 0 && (ready.revents & POLLIN) != 0;) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got <= 0) break;
    text.append(buffer, static_cast<std::size_t>(got));
  }
  return text;
}

class ProgressBarOnTerminal : public ::testing::Test {
 protected:
  ProgressBarOnTerminal() {
    variables_.set("TERM", "xterm-256color");
    variables_.set("LC_ALL", "C.UTF-8");
    variables_.unset("NO_COLOR");
  }
  void SetUp() override {
    winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
    if (::openpty(&controller_, &terminal_, nullptr, nullptr, &size) != 0)
      GTEST_SKIP() << "no pseudo-terminal can be opened here";
  }
  ~ProgressBarOnTerminal() override {
    ::close(terminal_);
    if (controller_ >= 0) ::close(controller_);
  }

  void resize(int width) {
    winsize size{
        .ws_row = 24, .ws_col = static_cast<unsigned short>(width), .ws_xpixel = 0, .ws_ypixel = 0};
    ASSERT_EQ(::ioctl(controller_, TIOCSWINSZ, &size), 0);
    screen_.resize(width);
  }
  void look() { screen_.write(read_available(controller_)); }

  Variables variables_;
  int controller_ = -1;
  int terminal_ = -1;
  Screen screen_{100};
};

TEST_F(ProgressBarOnTerminal, IsOneLineThatIsRedrawnAndEndsClean) {
  ProgressBar bar(terminal_, {.total_steps = 30});
  int step = 0;
  for (const int width : {100, 45, 160, 12, 80}) {
    look();
    resize(width);
    for (int i = 0; i < 6; ++i) {
      bar.update({.step = ++step, .loss = 2.5, .rate = 1e6 / step});
      if (i == 0) std::this_thread::sleep_for(milliseconds(110));
    }
    look();
    if (step == 12) bar.note("half");
    EXPECT_EQ(screen_.column(), 0u);
  }
  bar.finish();
  bar.update({.step = 31, .loss = 0});
  look();
  const auto lines = screen_.lines();
  ASSERT_THAT(lines, SizeIs(2));
  EXPECT_EQ(lines[0], "half");
  EXPECT_THAT(lines[1], ::testing::StartsWith("step 30/30  ━━━━"));
  EXPECT_THAT(lines[1], HasSubstr("100%  loss 2.500"));
  EXPECT_THAT(lines[1], HasSubstr("took 0:"));
  EXPECT_EQ(screen_.row(), 2u);
  EXPECT_EQ(screen_.column(), 0u);
  EXPECT_EQ(screen_.num_wraps(), 0);
  EXPECT_EQ(screen_.unknown(), "");
  EXPECT_TRUE(screen_.coloured());
}

TEST_F(ProgressBarOnTerminal, TheDestructorLeavesACleanLineToo) {
  {
    ProgressBar bar(terminal_, {.total_steps = 30});
    bar.update({.step = 1, .loss = 2.5});
  }
  look();
  EXPECT_THAT(screen_.lines(), SizeIs(1));
  EXPECT_EQ(screen_.row(), 1u);
}

TEST_F(ProgressBarOnTerminal, NoColorAndTheLocaleAreHeeded) {
  variables_.set("NO_COLOR", "1");
  variables_.set("LC_ALL", "C");
  ProgressBar bar(terminal_, {.total_steps = 30});
  bar.update({.step = 15, .loss = 2.5});
  look();
  EXPECT_FALSE(screen_.coloured());
  EXPECT_THAT(screen_.lines(), ElementsAre(HasSubstr("step 15/30  [=====")));
}

TEST_F(ProgressBarOnTerminal, ADumbTerminalGetsLines) {
  variables_.set("TERM", "dumb");
  ProgressBar bar(terminal_, {.total_steps = 30, .plain_every_steps = 1});
  bar.update({.step = 1, .loss = 2.5});
  bar.update({.step = 2, .loss = 2.25});
  look();
  EXPECT_THAT(screen_.lines(), ElementsAre(HasSubstr("step 1/30"), HasSubstr("step 2/30")));
  EXPECT_FALSE(screen_.coloured());
}

TEST_F(ProgressBarOnTerminal, ATerminalThatTakesNothingDelaysNobody) {
  ProgressBar bar(terminal_, {.total_steps = 1000000});
  bar.update({.step = 0, .loss = 1});
  look();
  ASSERT_EQ(::tcflow(terminal_, TCOOFF), 0);  // Ctrl-S
  const auto start = Clock::now();
  for (int step = 1; step < 20000; ++step) {
    bar.update({.step = step, .loss = 1});
    if (step % 100 == 0) bar.note(std::string(1000, 'x'));
  }
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(read_available(controller_), "");
  ASSERT_EQ(::tcflow(terminal_, TCOON), 0);
  bar.note("back again");
  for (int i = 0; i < 50; ++i) {
    look();
    bar.update({.step = 20000 + i, .loss = 1});
  }
  EXPECT_THAT(screen_.lines(), ::testing::Contains(std::string(100, 'x')));
  EXPECT_THAT(screen_.lines().back(), HasSubstr("step   200"));
}

TEST_F(ProgressBarOnTerminal, ATerminalThatIsGoneIsNoError) {
  ProgressBar bar(terminal_, {.total_steps = 30});
  bar.update({.step = 1, .loss = 2.5});
  ::close(std::exchange(controller_, -1));
  bar.note("nobody reads this");
  bar.finish();
  EXPECT_EQ(bar.error(), EPIPE);
}

TEST(ProgressBar, APipeGetsPlainLines) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  {
    ProgressBar bar(ends[1], {.total_steps = 3});
    bar.update({.step = 1, .loss = 2.5, .rate = 1500});
    bar.update({.step = 2, .loss = 2.25, .rate = 1500});
    bar.note("a note");
    bar.update({.step = 3, .loss = 2, .validation_loss = 2.125, .rate = 1500});
    EXPECT_EQ(bar.error(), 0);
  }
  EXPECT_THAT(read_available(ends[0]),
              ::testing::StartsWith("step 1/3  33%  loss 2.500  1.50k tok/s  left -:--\n"
                                    "a note\n"
                                    "step 3/3  100%  loss 2.000  val 2.125  1.50k tok/s  took 0:"));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(ProgressBar, APipeWithoutAReaderIsNoError) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ProgressBar bar(ends[1], {.total_steps = 3, .plain_every_steps = 1});
  bar.update({.step = 1, .loss = 2.5});
  ::close(ends[0]);
  bar.update({.step = 2, .loss = 2.5});  // SIGPIPE would end this program
  EXPECT_EQ(bar.error(), EPIPE);
  bar.note("lost");
  bar.finish();
  ::close(ends[1]);
}

TEST(ProgressBar, AFullDiskIsToldFromAReaderWhoLeft) {
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  ProgressBar bar(full, {.total_steps = 3, .plain_every_steps = 1});
  EXPECT_EQ(bar.error(), 0);
  bar.update({.step = 1, .loss = 2.5});
  EXPECT_EQ(bar.error(), ENOSPC);
  bar.finish();
  ::close(full);
}

TEST(ProgressBar, NotesMayComeFromOtherThreads) {
  const int null = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  {
    ProgressBar bar(null, {.total_steps = 1000, .terminal = ProgressBar::Terminal::always});
    std::jthread other([&] {
      for (int i = 0; i < 1000; ++i) bar.note("a checkpoint is on disk");
    });
    for (int i = 0; i < 1000; ++i) bar.update({.step = i, .loss = 1});
  }
  ::close(null);
}

}  // namespace
}  // namespace lockstep::observe
