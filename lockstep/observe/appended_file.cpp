#include <lockstep/observe/appended_file.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include <lockstep/base/durable_file.h>

namespace lockstep::observe {

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
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)) {}

AppendedFile& AppendedFile::operator=(AppendedFile&& other) noexcept {
  if (this != &other) {
    if (fd_ >= 0) ::close(fd_);
    path_ = std::move(other.path_);
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void AppendedFile::append(std::string_view record) {
  while (!record.empty()) {
    const ssize_t written = ::write(fd_, record.data(), record.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
    record.remove_prefix(static_cast<std::size_t>(written));
  }
}

void AppendedFile::sync() {
  // Pipes and some file systems cannot sync, and say EINVAL.
  if (::fsync(fd_) != 0 && errno != EINVAL && errno != EROFS)
    throw FileError("cannot sync '{}': {}", path_.string(), std::strerror(errno));
}

}  // namespace lockstep::observe
