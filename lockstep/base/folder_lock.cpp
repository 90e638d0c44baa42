#include <lockstep/base/folder_lock.h>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>

namespace lockstep {

namespace {

constexpr const char* kNoteFile = ".holder";

// A process that only checks whether a folder is free holds the lock for a moment, so try again.
constexpr int kAttempts = 4;
constexpr std::chrono::milliseconds kBetweenAttempts(25);

// A descriptor that is closed with its scope, or handed on.
class Opened {
 public:
  explicit Opened(int fd) : fd_(fd) {}
  ~Opened() {
    if (fd_ >= 0) ::close(fd_);
  }
  Opened(const Opened&) = delete;
  Opened& operator=(const Opened&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

enum class Locked { here, elsewhere, no_locks };

Locked try_lock(int fd, int how) {
  while (::flock(fd, how | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    return errno == EWOULDBLOCK ? Locked::elsewhere : Locked::no_locks;
  }
  return Locked::here;
}

// " (process 4711)", or nothing where the system does not say. A line of /proc/locks is
// "2: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF"; some file systems have another device there
// than in stat(), so that the inode alone decides.
std::string process_in_the_way(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return "";
  std::ifstream locks("/proc/locks");
  std::string line, number, kind, mode, access, process, file;
  while (std::getline(locks, line)) {
    if (!(std::istringstream(line) >> number >> kind >> mode >> access >> process >> file))
      continue;
    const std::string inode = ":" + std::to_string(info.st_ino);
    if (kind == "FLOCK" && file.ends_with(inode)) return " (process " + process + ")";
  }
  return "";
}

std::string text_of(const FolderHolder& holder) {
  return fmt::format("generation {} of job {}\n", holder.generation, holder.job);
}

// Nothing where it is no text of ours.
std::optional<FolderHolder> read_holder(int fd) {
  std::array<char, 1024> bytes{};
  const ssize_t size = ::pread(fd, bytes.data(), bytes.size(), 0);
  if (size <= 0) return std::nullopt;
  FolderHolder holder;
  std::istringstream words(std::string(bytes.data(), static_cast<std::size_t>(size)));
  std::string generation, of, job;
  if (!(words >> generation >> holder.generation >> of >> job >> holder.job)) return std::nullopt;
  if (text_of(holder) != words.str()) return std::nullopt;
  return holder;
}

// For keep_going, as every error of a generation that is over.
CommError taken_over(const std::filesystem::path& folder,
                     const std::optional<FolderHolder>& holder) {
  return CommError(
      {.fault = Fault::aborted,
       .operation = fmt::format("writing into '{}'", folder.string()),
       .explanation = fmt::format(
           "The folder is not this generation's any more: {} has taken it over, which this one was "
           "lost to. Nothing more is written there.",
           holder ? fmt::format("generation {} of the job", holder->generation) : "another run")});
}

bool same_file(int a, int b) {
  struct stat first {};
  struct stat second {};
  return ::fstat(a, &first) == 0 && ::fstat(b, &second) == 0 && first.st_dev == second.st_dev &&
         first.st_ino == second.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::filesystem::path& folder,
                       const std::optional<FolderHolder>& holder)
    : folder_(folder) {
  Opened fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) throw FileError("cannot open '{}': {}", folder.string(), std::strerror(errno));
  for (int attempt = 1;; ++attempt) {
    const Locked of_folder = try_lock(fd.get(), LOCK_EX);
    // The folder's own lock may be that of an earlier generation than the one that holds it.
    const Opened noted(::open((folder / kNoteFile).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    const Locked of_note = noted.get() < 0 ? Locked::no_locks : try_lock(noted.get(), LOCK_SH);
    bool free = of_folder != Locked::elsewhere && of_note != Locked::elsewhere;
    if (holder && of_note == Locked::elsewhere) {
      const auto other = read_holder(noted.get());
      const bool of_this_job = other && other->job == holder->job;
      if (of_this_job && other->generation > holder->generation) throw taken_over(folder, other);
      free = of_this_job && other->generation < holder->generation;
    }
    if (free && holder && !note(*holder, noted.get())) continue;
    if (free) break;
    if (attempt >= kAttempts)
      throw UsageError("another run writes into '{}'{}: give each run a folder of its own, or wait "
                       "until the other one has ended",
                       folder.string(),
                       process_in_the_way(of_note == Locked::elsewhere ? noted.get() : fd.get()));
    ::flock(fd.get(), LOCK_UN);
    std::this_thread::sleep_for(kBetweenAttempts);
  }
  fd_ = fd.release();
}

// Under another name until it is whole and locked. False where the file is another by then than the
// one that was looked at: this process may have been stopped in between, for any time.
bool FolderLock::note(const FolderHolder& holder, int looked_at) {
  const std::filesystem::path path = folder_ / kNoteFile;
  const std::string fresh = fmt::format("{}-{}", path.string(), ::getpid());
  const std::string text = text_of(holder);
  ::unlink(fresh.c_str());
  Opened fd(::open(fresh.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  const auto fail = [&] {
    const int reason = errno;
    ::unlink(fresh.c_str());
    throw FileError("cannot write '{}': {}", path.string(), std::strerror(reason));
  };
  if (fd.get() < 0) fail();
  try_lock(fd.get(), LOCK_EX);
  errno = ENOSPC;  // where only a part of it is written
  if (::write(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size())) fail();
  const Opened now(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (now.get() >= 0 && !same_file(now.get(), looked_at)) {
    ::unlink(fresh.c_str());
    const auto other = read_holder(now.get());
    if (other && other->job == holder.job && other->generation > holder.generation)
      throw taken_over(folder_, other);
    return false;
  }
  if (::rename(fresh.c_str(), path.c_str()) != 0) fail();
  note_ = fd.release();
  return true;
}

FolderLock::~FolderLock() {
  if (note_ >= 0) ::close(note_);
  if (fd_ >= 0) ::close(fd_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept
    : folder_(std::move(other.folder_)),
      fd_(std::exchange(other.fd_, -1)),
      note_(std::exchange(other.note_, -1)) {}

void FolderLock::check() const {
  if (note_ < 0) return;
  // Opened, and not only looked at: a network file system asks its server then.
  const Opened now(::open((folder_ / kNoteFile).c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (now.get() < 0 || same_file(now.get(), note_)) return;
  throw taken_over(folder_, read_holder(now.get()));
}

}  // namespace lockstep
