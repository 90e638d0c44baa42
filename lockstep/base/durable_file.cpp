#include <lockstep/base/durable_file.h>

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace lockstep {

DurableFile::DurableFile(std::filesystem::path path, Length length)
    : path_(std::move(path)), temporary_(path_.string() + ".part") {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
  if (length == Length::much_data) direct_ = std::make_unique<DirectOutput>(fd_);
}

DurableFile::~DurableFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void DurableFile::write(std::span<const std::byte> bytes) {
  if (direct_) {
    if (!direct_->write(bytes))
      throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
    return;
  }
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void DurableFile::commit(Folder folder) {
  // The descriptor is closed whether or not close() reports the loss.
  const bool synced = (!direct_ || direct_->finish()) && ::fsync(fd_) == 0;
  const int why = errno;
  const bool closed = ::close(std::exchange(fd_, -1)) == 0;
  if (!synced || !closed) {
    const int reason = synced ? errno : why;
    ::unlink(temporary_.c_str());
    throw FileError("cannot write '{}': {}", path_.string(), std::strerror(reason));
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int reason = errno;
    ::unlink(temporary_.c_str());
    throw FileError("cannot write '{}': {}", path_.string(), std::strerror(reason));
  }
  if (folder == Folder::is_synced) sync_folder(path_.has_parent_path() ? path_.parent_path() : ".");
}

void write_durably(const std::filesystem::path& path, std::string_view text,
                   DurableFile::Folder folder) {
  DurableFile file(path);
  file.write(text);
  file.commit(folder);
}

void sync_folder(const std::filesystem::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  // Some file systems cannot sync a folder, and say EINVAL.
  const bool synced = fd >= 0 && (::fsync(fd) == 0 || errno == EINVAL);
  const int why = errno;
  if (fd >= 0) ::close(fd);
  if (!synced) throw FileError("cannot sync '{}': {}", folder.string(), std::strerror(why));
}

}  // namespace lockstep
