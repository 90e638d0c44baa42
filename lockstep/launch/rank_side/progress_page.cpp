#include <lockstep/launch/rank_side/progress_page.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/launch/rank_side/report.h>

namespace lockstep {

ProgressPage::ProgressPage(int num_ranks) : num_ranks_(num_ranks) {
  const std::size_t bytes = static_cast<std::size_t>(num_ranks) * sizeof(Slot);
  fd_ = ::memfd_create("lockstep-progress", MFD_ALLOW_SEALING);
  if (fd_ >= 0 && ::ftruncate(fd_, static_cast<off_t>(bytes)) == 0 &&
      ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (memory != MAP_FAILED) slots_ = static_cast<Slot*>(memory);  // zeros are empty slots
  }
  if (slots_ == nullptr) {
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw UsageError("cannot share {} bytes of memory with the ranks: {}", bytes,
                     std::strerror(error));
  }
}

std::optional<ProgressPage> ProgressPage::inherited(int fd, int local_rank) {
  struct stat info {};
  const auto needed = (static_cast<off_t>(local_rank) + 1) * static_cast<off_t>(sizeof(Slot));
  // The descriptor may be another file's by now: our seals show that it is the page.
  if (::fstat(fd, &info) != 0 || info.st_size < needed ||
      info.st_size % static_cast<off_t>(sizeof(Slot)) != 0 ||
      ::fcntl(fd, F_GET_SEALS) != (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))
    return std::nullopt;
  void* const memory = ::mmap(nullptr, static_cast<std::size_t>(info.st_size),
                              PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return std::nullopt;
  ProgressPage page;
  page.num_ranks_ = static_cast<int>(info.st_size / static_cast<off_t>(sizeof(Slot)));
  page.slots_ = static_cast<Slot*>(memory);
  return page;
}

ProgressPage::ProgressPage(ProgressPage&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      num_ranks_(other.num_ranks_),
      slots_(std::exchange(other.slots_, nullptr)) {}

ProgressPage::~ProgressPage() {
  if (slots_ != nullptr) ::munmap(slots_, static_cast<std::size_t>(num_ranks_) * sizeof(Slot));
  if (fd_ >= 0) ::close(fd_);
}

void ProgressPage::report(int local_rank, std::uint64_t step) const {
  LOCKSTEP_CHECK(local_rank >= 0 && local_rank < num_ranks_);
  slots_[local_rank].steps.store(step + 1, std::memory_order_relaxed);
}

std::optional<std::uint64_t> ProgressPage::step(int local_rank) const {
  LOCKSTEP_CHECK(local_rank >= 0 && local_rank < num_ranks_);
  const std::uint64_t steps = slots_[local_rank].steps.load(std::memory_order_relaxed);
  if (steps == 0) return std::nullopt;
  return steps - 1;
}

void ProgressPage::clear() const {
  for (int rank = 0; rank < num_ranks_; ++rank)
    slots_[rank].steps.store(0, std::memory_order_relaxed);
}

namespace {

struct OwnSlot {
  std::optional<ProgressPage> page;
  int local_rank = 0;
};

OwnSlot own_slot() {
  try {
    const LaunchEnvironment env = read_launch_environment();
    if (env.progress_fd)
      return {ProgressPage::inherited(*env.progress_fd, env.local_rank), env.local_rank};
  } catch (const Error&) {
    // Where the environment is wrong, joining the job says so.
  }
  return {};
}

}  // namespace

void report_progress(std::uint64_t step) noexcept {
  static const OwnSlot slot = own_slot();
  if (slot.page) slot.page->report(slot.local_rank, step);
}

}  // namespace lockstep
