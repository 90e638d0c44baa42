#include <lockstep/base/clock.h>

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <thread>

namespace lockstep {

namespace {

using Nanoseconds = std::chrono::nanoseconds::rep;

// A thread's beats push the end of the clock ahead of it. If the process is stopped, there are no
// beats: the clock stands at its end, also for a thread that wakes up before the next beat, until
// that beat leaves out the gap.
constexpr milliseconds kBetweenBeats(100);
// How far the end lies ahead of a beat. A thread that the machine makes wait for longer than that
// makes deadlines longer, and never shorter.
constexpr milliseconds kAhead(500);

constexpr Nanoseconds kNoEnd = std::numeric_limits<Nanoseconds>::max();

// Only the beating thread writes them, the end last: whoever reads a new end also reads what was
// left out before it. An old end with a new `left_out` gives the old end, which is right: that is
// where the clock stood.
std::atomic<Nanoseconds> left_out{0};
std::atomic<Nanoseconds> end_of_clock{kNoEnd};
std::atomic<bool> beats{false};

Nanoseconds steady_time() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void beat() {
  constexpr Nanoseconds ahead = std::chrono::nanoseconds(kAhead).count();
  const Nanoseconds end = end_of_clock.load(std::memory_order_relaxed);
  Nanoseconds time = steady_time() - left_out.load(std::memory_order_relaxed);
  if (time > end) {
    left_out.fetch_add(time - end, std::memory_order_relaxed);
    time = end;
  }
  end_of_clock.store(time + ahead, std::memory_order_release);
}

// A child has no beating thread: without this its clock would stand still.
void end_beats_in_child() {
  end_of_clock.store(kNoEnd, std::memory_order_relaxed);
  beats.store(false, std::memory_order_relaxed);
}

}  // namespace

Clock::time_point Clock::now() noexcept {
  const Nanoseconds end = end_of_clock.load(std::memory_order_acquire);
  // Before the time is taken: a stop between the two makes the time too late, which `end` mends.
  const Nanoseconds not_counted = left_out.load(std::memory_order_relaxed);
  return time_point(duration(std::min(steady_time() - not_counted, end)));
}

void Clock::leave_out_stops() {
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(nullptr, nullptr, end_beats_in_child); });
  if (beats.exchange(true)) return;
  // Signals are for the program's own threads.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([] {
    while (true) {
      beat();
      std::this_thread::sleep_for(kBetweenBeats);
    }
  }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace lockstep
