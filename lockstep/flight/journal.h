// The recorders of all groups of one process, which writes their dumps when something goes wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include <lockstep/flight/dump.h>
#include <lockstep/flight/recorder.h>

namespace lockstep::flight {

// Shared by the communicators of a process; any thread may call anything. Where a group fails, this
// process writes the calls of all its groups, and so do the host's other processes with the same
// directory, even while they compute: a thread of the journal waits for demands (dump.h). Nothing
// here throws but the constructor.
class Journal {
 public:
  // An empty directory: nothing is ever written, and there is no thread.
  explicit Journal(std::filesystem::path directory = {});
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // From now on until it is gone; recorders are not kept alive.
  void add(const std::shared_ptr<Recorder>& recorder);

  // Where the program is, for the reader of a report: tens of nanoseconds, so it may be called
  // several times a step. `phase` has static lifetime.
  void note_progress(std::uint64_t step, const char* phase = "") noexcept;

  // This rank refuses to go on to its next call, whichever group's that is, and throws `reason`.
  // Ranks that wait for it are told so once they ask (circle.h).
  void note_refusal(const std::string& reason) noexcept;

  // How long this process's threads have been in waits for calls, all of them together: who takes
  // from a step's time what this grew by has the time of its own work (observe/slow_ranks.h). Waits
  // that only order a device's stream take no time here.
  double waited_seconds() const noexcept {
    return static_cast<double>(waited_ns_.load(std::memory_order_relaxed)) * 1e-9;
  }
  void add_waited(std::int64_t ns) noexcept { waited_ns_.fetch_add(ns, std::memory_order_relaxed); }

  // Which rank found that a group has failed. The one that did asks the others for their dumps.
  enum class FoundBy : std::uint8_t { this_rank, another };

  // Writes the dumps of this process, the failed group's first. Its cause stays with it. Tells the
  // launcher which ranks it blames (launch/rank_side/launcher_line.h), even without a directory.
  void group_failed(const Recorder& group, const Cause& cause, FoundBy found_by) noexcept;

 private:
  struct Kept {
    std::weak_ptr<Recorder> recorder;
    std::optional<Cause> failure;
  };

  void write_all(const Recorder* first, const Cause& otherwise) noexcept;
  void write_one(const Recorder& recorder, const Cause& cause) noexcept;
  std::optional<Progress> progress() const;
  void watch(const std::stop_token& stop) noexcept;
  void answer_demand() noexcept;

  const std::filesystem::path directory_;
  std::mutex mutex_;
  std::map<const Recorder*, Kept> recorders_;
  std::int64_t round_before_ = 0;  // of a demand that was there when this journal began
  std::int64_t round_ = 0;         // of the newest that is known
  std::int64_t written_ = 0;       // when, as rounds are
  std::atomic<std::uint64_t> step_{0};
  std::atomic<const char*> phase_{""};
  std::atomic<std::int64_t> noted_ns_{0};
  std::atomic<std::int64_t> waited_ns_{0};
  int wake_ = -1;      // an eventfd that ends the watching
  int files_ = -1;     // what the kernel tells of the directory,
  bool told_ = false;  // where it does
  std::jthread watcher_;
};

}  // namespace lockstep::flight
