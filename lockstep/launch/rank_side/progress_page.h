// Memory that a launcher shares with its ranks: how far each of them has come.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace lockstep {

// A slot for each rank of a host, by local rank. It lies in an anonymous file (memfd) whose size is
// sealed, so that no rank can cut it under the launcher; ranks inherit the descriptor. Owns its
// mapping, and in the launcher the descriptor. Thread-safe.
class ProgressPage {
 public:
  // Makes the launcher's. UsageError where the memory cannot be had.
  explicit ProgressPage(int num_ranks);

  // Opens a rank's, from the descriptor it inherited; nothing where that is no such page with a
  // slot for the rank.
  static std::optional<ProgressPage> inherited(int fd, int local_rank);

  ~ProgressPage();
  ProgressPage(ProgressPage&& other) noexcept;
  ProgressPage(const ProgressPage&) = delete;
  ProgressPage& operator=(const ProgressPage&) = delete;

  // Not closed on exec; -1 in a rank.
  int descriptor() const { return fd_; }

  void report(int local_rank, std::uint64_t step) const;

  // The last step that the rank reported since clear(), or nothing.
  std::optional<std::uint64_t> step(int local_rank) const;

  void clear() const;

 private:
  // Each has a cache line of its own.
  struct alignas(64) Slot {
    std::atomic<std::uint64_t> steps{0};  // one more than the step; 0: nothing was reported
  };

  ProgressPage() = default;

  int fd_ = -1;
  int num_ranks_ = 0;
  Slot* slots_ = nullptr;
};

}  // namespace lockstep
