#include <lockstep/recovery/keep_going.h>

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/open_groups.h>
#include <lockstep/launch/rank_side/launcher_line.h>

namespace lockstep {

namespace {

// A call that failed because another rank is gone is thrown before, or soon after, the launchers
// know: they hear of a host that is cut off by its silence, and see that a rank is stopped when it
// has been for a while.
constexpr milliseconds kNewsComes(10'000);
// So long that nobody needs to be told what is waited for.
constexpr milliseconds kQuietly(500);

// How long the launcher's word is worth waiting for after such an error. There is none where ranks
// that are all there made different calls, nor of a rank that stands still where no restart is
// left.
milliseconds news_may_take(Fault fault) {
  if (fault == Fault::mismatch) return milliseconds(0);
  const LaunchEnvironment job = read_launch_environment();
  return fault == Fault::timeout && job.restart_count >= job.max_restarts ? kQuietly : kNewsComes;
}

std::atomic<bool> asked{false};

// Listens while the body runs.
class Listener {
 public:
  explicit Listener(const LauncherLine& line) : line_(line), wake_(::eventfd(0, EFD_CLOEXEC)) {
    asked = false;
    comm::admit_groups();
    // Signals are for the thread that runs the program.
    sigset_t all;
    sigset_t before;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([this] { listen(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  ~Listener() {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_, &one, sizeof(one));
    thread_.join();
    ::close(wake_);
  }

  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Whether the generation is over, or is within so long.
  bool over(milliseconds within) {
    std::unique_lock lock(mutex_);
    heard_.wait_until(lock, Deadline::after(within).at(), [this] { return over_ || gone_; });
    return over_;
  }

 private:
  void listen() {
    try {
      while (const auto message = line_.hear(Deadline::never(), wake_)) {
        if (message->word == LineMessage::Word::leave_soon) asked = true;
        if (message->word == LineMessage::Word::leave) {
          note(over_);
          comm::abort_open_groups("the job is formed anew");
        }
      }
    } catch (const CommError&) {
      note(gone_);
    }
  }

  void note(bool& what) {
    const std::lock_guard lock(mutex_);
    what = true;
    heard_.notify_all();
  }

  const LauncherLine& line_;
  int wake_;
  std::mutex mutex_;
  std::condition_variable heard_;
  bool over_ = false;
  bool gone_ = false;
  std::thread thread_;
};

// Whether the body is to be run again. What it throws otherwise goes on to the caller.
bool left_generation(const LauncherLine& line, const std::function<void()>& body) {
  Listener listener(line);
  try {
    body();
    return asked || listener.over(milliseconds(0));
  } catch (const CommError& error) {
    const milliseconds longest = news_may_take(error.fault());
    const milliseconds quietly = std::min(longest, kQuietly);
    if (listener.over(quietly)) return true;
    if (longest == quietly) throw;
    log::warn("{} Waiting up to {:.1f} s for the launcher, which may form the job anew.",
              error.what(), std::chrono::duration<double>(longest).count());
    if (!listener.over(longest - quietly)) throw;
  } catch (...) {
    if (!listener.over(milliseconds(0))) throw;
  }
  return true;
}

}  // namespace

bool asked_to_leave() { return asked; }

void keep_going(const std::function<void()>& body) {
  const auto line = LauncherLine::inherited();
  if (!line) return body();
  line->say(LineMessage::Word::stays);
  await_place_as_spare();
  while (left_generation(*line, body)) {
    line->say(LineMessage::Word::left);
    await_place(*line);
  }
}

}  // namespace lockstep
