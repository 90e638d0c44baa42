#include <lockstep/observe/appended_file.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/durable_file.h>

namespace lockstep::observe {

namespace {

constexpr std::size_t kMostKept = 1 << 20;

}  // namespace

AppendedFile::AppendedFile(std::filesystem::path path, Existing existing) : path_(std::move(path)) {
  const int refuse = existing == Existing::refuse ? O_EXCL : 0;
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | refuse, 0666);
  if (fd_ < 0 && !(refuse != 0 && errno == EEXIST))
    throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
}

AppendedFile::~AppendedFile() {
  if (fd_ >= 0) ::close(fd_);
}

AppendedFile::AppendedFile(AppendedFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      kept_(std::move(other.kept_)),
      num_lost_(other.num_lost_) {}

void AppendedFile::append(std::string_view record) {
  const bool has_room = kept_.empty() || kept_.size() + record.size() <= kMostKept;
  if (has_room)
    kept_.append(record);
  else
    ++num_lost_;
  append_kept();
}

void AppendedFile::reopen() {
  const int fd = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
  ::close(std::exchange(fd_, fd));
}

void AppendedFile::append_kept() {
  struct stat before {};
  const bool can_be_cut = ::fstat(fd_, &before) == 0 && S_ISREG(before.st_mode);
  for (std::string_view rest = kept_; !rest.empty();) {
    const ssize_t written = ::write(fd_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int reason = errno;
      // A torn record goes; what is no file has taken what it has taken.
      if (!can_be_cut)
        kept_.clear();
      else if (::ftruncate(fd_, before.st_size) != 0)
        kept_.erase(0, kept_.size() - rest.size());
      throw FileError("cannot write '{}': {}", path_.string(), std::strerror(reason));
    }
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  kept_.clear();
}

void AppendedFile::sync() {
  append_kept();
  // Pipes and some file systems cannot sync, and say EINVAL.
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS)
    throw FileError("cannot sync '{}': {}", path_.string(), std::strerror(errno));
}

}  // namespace lockstep::observe
