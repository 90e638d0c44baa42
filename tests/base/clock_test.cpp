// The clock leaves out the time in which its process was stopped, and only that.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include <lockstep/base/deadline.h>

namespace lockstep {
namespace {

using Steady = std::chrono::steady_clock;

constexpr milliseconds kStopped(1500);
constexpr milliseconds kMayCount(600);  // half a second of each stop, and a beat

// Waits until the clock has gone on by more than it may count of a stop.
void let_it_go_on() {
  const Deadline later = Deadline::after(kMayCount);
  while (!later.passed()) std::this_thread::sleep_for(milliseconds(5));
}

// Numbers that a child tells its parent.
class Channel {
 public:
  Channel() { EXPECT_EQ(::pipe(ends_.data()), 0); }
  ~Channel() {
    for (const int end : ends_) ::close(end);
  }
  void send(double number) const {
    if (::write(ends_[1], &number, sizeof(number)) != sizeof(number)) ::_exit(9);
  }
  double receive() const {
    double number = 0;
    return ::read(ends_[0], &number, sizeof(number)) == sizeof(number) ? number : std::nan("");
  }

 private:
  std::array<int, 2> ends_{};
};

// Runs `body` in a child, which must return. The clock's thread must not stay in the test program.
pid_t in_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(60);
  body();
  ::_exit(0);
}

void expect_ends_well(pid_t child) {
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

struct Elapsed {
  double clock = 0;
  double steady = 0;
};

// The time that passes on both clocks of a child that is stopped in between.
Elapsed while_stopped(const std::function<void()>& begin) {
  const Channel to_child, from_child;
  const pid_t child = in_child([&] {
    begin();
    const auto clock = Clock::now();
    const auto steady = Steady::now();
    from_child.send(0);
    to_child.receive();  // is stopped in this call
    from_child.send(std::chrono::duration<double>(Clock::now() - clock).count());
    from_child.send(std::chrono::duration<double>(Steady::now() - steady).count());
    let_it_go_on();
  });
  from_child.receive();
  int status = 0;
  ::kill(child, SIGSTOP);
  EXPECT_EQ(::waitpid(child, &status, WUNTRACED), child);
  EXPECT_TRUE(WIFSTOPPED(status));
  std::this_thread::sleep_for(kStopped);
  to_child.send(0);
  ::kill(child, SIGCONT);
  Elapsed elapsed;
  elapsed.clock = from_child.receive();
  elapsed.steady = from_child.receive();
  expect_ends_well(child);
  return elapsed;
}

double in_seconds(milliseconds span) { return std::chrono::duration<double>(span).count(); }

TEST(Clock, LeavesOutStops) {
  const Elapsed elapsed = while_stopped([] {
    Clock::leave_out_stops();
    Clock::leave_out_stops();  // the second call changes nothing
    let_it_go_on();
  });
  EXPECT_GE(elapsed.steady, in_seconds(kStopped));
  EXPECT_GE(elapsed.clock, 0);
  EXPECT_LE(elapsed.clock, elapsed.steady - in_seconds(kStopped - kMayCount));
}

TEST(Clock, CountsStopsUnlessTold) {
  const Elapsed elapsed = while_stopped([] {});
  EXPECT_GE(elapsed.clock, in_seconds(kStopped));
}

TEST(Clock, NeverGoesBackAndLosesNothingInAProcessThatRuns) {
  const Channel channel;
  const pid_t child = in_child([&] {
    Clock::leave_out_stops();
    const auto begin = Clock::now();
    const auto steady = Steady::now();
    bool forward = true;
    for (auto last = begin; last - begin < 2 * kMayCount;) {
      const auto now = Clock::now();
      forward = forward && now >= last;
      last = now;
    }
    channel.send(forward ? 1 : 0);
    channel.send(std::chrono::duration<double>(Steady::now() - steady).count());
  });
  EXPECT_EQ(channel.receive(), 1);
  EXPECT_GE(channel.receive(), in_seconds(2 * kMayCount));
  expect_ends_well(child);
}

TEST(Clock, GoesOnInAChildOfAProcessThatLeavesOutStops) {
  const pid_t child = in_child([] {
    Clock::leave_out_stops();
    let_it_go_on();
    const auto before = Clock::now();
    expect_ends_well(in_child([before] {
      if (Clock::now() < before) ::_exit(1);
      let_it_go_on();
    }));
    if (::testing::Test::HasFailure()) ::_exit(2);
  });
  expect_ends_well(child);
}

}  // namespace
}  // namespace lockstep
