#include <lockstep/flight/journal.h>

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <vector>

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/flight/dump.h>
#include <lockstep/launch/rank_side/launcher_line.h>

namespace lockstep::flight {

namespace {

// How often to look for new files where the kernel cannot tell of them: it lets a user have few
// watches, and does not see files that other hosts write.
constexpr int kLookIntervalMs = 250;

// Ranks that find a failure at once each demand dumps; one for all of them is enough.
constexpr std::int64_t kSameFailureNs = 1'000'000'000;

constexpr const char* kAsked = "asked where it is";

void keep_signals_away() {
  sigset_t all;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

void read_away(int descriptor) {
  char bytes[4096];
  while (::read(descriptor, bytes, sizeof(bytes)) > 0) {
  }
}

}  // namespace

Journal::Journal(std::filesystem::path directory) : directory_(std::move(directory)) {
  if (directory_.empty()) return;
  std::error_code ignored;  // write_dump() reports what is wrong when it writes
  std::filesystem::create_directories(directory_, ignored);
  // Open this before the first look, so that the kernel tells of every file that comes after it.
  files_ = ::inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  told_ = files_ >= 0 && ::inotify_add_watch(files_, directory_.c_str(), IN_MOVED_TO) >= 0;
  if (const auto demand = current_demand(directory_)) round_before_ = demand->round;
  round_ = round_before_;
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) throw UsageError("no descriptor is left for a watcher: raise 'ulimit -n'");
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

Journal::~Journal() {
  if (wake_ < 0) return;
  watcher_.request_stop();
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_, &one, sizeof(one));
  watcher_.join();
  ::close(wake_);
  if (files_ >= 0) ::close(files_);
}

void Journal::add(const std::shared_ptr<Recorder>& recorder) {
  const std::lock_guard lock(mutex_);
  std::erase_if(recorders_, [](const auto& each) { return each.second.recorder.expired(); });
  recorders_[recorder.get()] = {.recorder = recorder, .failure = std::nullopt};
}

void Journal::note_progress(std::uint64_t step, const char* phase) noexcept {
  step_.store(step, std::memory_order_relaxed);
  phase_.store(phase, std::memory_order_relaxed);
  noted_ns_.store(now_ns(), std::memory_order_relaxed);
}

void Journal::note_refusal(const std::string& reason) noexcept {
  try {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, kept] : recorders_)
      if (const auto recorder = kept.recorder.lock()) recorder->note_refusal(reason);
  } catch (...) {
    // Out of memory: others wait until their deadline.
  }
}

// A step and the phase of the next may come together; a reader loses nothing by that.
std::optional<Progress> Journal::progress() const {
  const std::int64_t noted_ns = noted_ns_.load(std::memory_order_relaxed);
  if (noted_ns == 0) return std::nullopt;
  return Progress{.step = step_.load(std::memory_order_relaxed),
                  .phase = phase_.load(std::memory_order_relaxed),
                  .noted_ns = noted_ns};
}

void Journal::group_failed(const Recorder& group, const Cause& cause, FoundBy found_by) noexcept {
  blame(cause.at_fault, cause.fault, group.global_rank());
  if (directory_.empty()) return;
  try {
    const std::lock_guard lock(mutex_);
    auto& failure = recorders_[&group].failure;
    if (!failure) failure = cause;
    // Later failures follow from the first one: a report needs the state of the ranks at that time.
    const auto demand = current_demand(directory_);
    const bool demanded = demand && demand->round != round_before_ &&
                          demand->why == Demand::Why::failed &&
                          demand->generation >= group.generation();
    if (found_by == FoundBy::this_rank && !demanded) {
      round_ = demand_dumps(directory_, Demand::Why::failed, group.generation());
    } else if (demand) {
      round_ = demand->round;
    }
    write_all(&group, {.reason = fmt::format("group '{}' failed: {}", group.group(), cause.reason),
                       .fault = {},
                       .at_fault = {}});
  } catch (...) {
    // Out of memory: the error that brought us here is the one to report.
  }
}

void Journal::write_all(const Recorder* first, const Cause& otherwise) noexcept {
  written_ = wall_clock_ns();
  try {
    std::vector<std::shared_ptr<const Recorder>> alive;
    for (const auto& [key, kept] : recorders_)
      if (auto recorder = kept.recorder.lock()) alive.push_back(std::move(recorder));
    for (const bool now : {true, false})
      for (const auto& recorder : alive) {
        if ((recorder.get() == first) != now) continue;
        const auto& failure = recorders_[recorder.get()].failure;
        write_one(*recorder, failure ? *failure : otherwise);
      }
  } catch (...) {
    // Out of memory.
  }
}

void Journal::write_one(const Recorder& recorder, const Cause& cause) noexcept {
  try {
    Dump dump = take_dump(recorder, cause);
    dump.as_of_ns = std::max(dump.as_of_ns, round_);
    dump.progress = progress();
    write_dump(dump, directory_);
  } catch (...) {
    // Out of memory.
  }
}

void Journal::answer_demand() noexcept {
  try {
    const auto demand = current_demand(directory_);
    const std::lock_guard lock(mutex_);
    if (!demand || demand->round == round_ || demand->round == round_before_) return;
    round_ = demand->round;
    if (demand->why == Demand::Why::failed && demand->round - written_ < kSameFailureNs) return;
    write_all(
        nullptr,
        {.reason = demand->why == Demand::Why::asked ? kAsked : "a group failed on another rank",
         .fault = {},
         .at_fault = {}});
  } catch (...) {
    // Out of memory: the next demand may do better.
  }
}

void Journal::watch(const std::stop_token& stop) noexcept {
  keep_signals_away();
  while (!stop.stop_requested()) {
    pollfd descriptors[] = {{wake_, POLLIN, 0}, {files_, POLLIN, 0}};
    ::poll(descriptors, told_ ? 2 : 1, told_ ? 4 * kLookIntervalMs : kLookIntervalMs);
    if (told_) read_away(files_);
    answer_demand();
  }
}

}  // namespace lockstep::flight
