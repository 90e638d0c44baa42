#include <lockstep/base/durable_file.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

namespace lockstep {

namespace {

// Memory, offsets and lengths of direct writes are multiples of this; disks ask for 512 to 4096.
constexpr std::size_t kBlockBytes = 4096;
// Enough for a disk to work on several parts at once.
constexpr std::size_t kBufferBytes = 4 << 20;

bool set_direct([[maybe_unused]] int fd, [[maybe_unused]] bool direct) {
#if defined(O_DIRECT)
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
#else
  return false;
#endif
}

// A file system that is the page cache takes direct writes and copies them like any other.
bool is_in_memory([[maybe_unused]] int fd) {
#if defined(__linux__)
  struct statfs system = {};
  return ::fstatfs(fd, &system) == 0 &&
         (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
#else
  return false;
#endif
}

}  // namespace

// Writes past the page cache: the disk takes the bytes directly from our memory. This costs the
// processor several times less work than copying them into the cache, and other programs keep what
// they have cached. Where a file system refuses direct writes, the bytes go the usual way.
//
// Ownership: the descriptor is the caller's. Threading: one thread. Failure: false, with the
// system's reason in errno; the file is then not to be used.
class DurableFile::DirectOutput {
 public:
  explicit DirectOutput(int fd);

  bool write(std::span<const std::byte> bytes);
  // Writes what is still in memory. Nothing may be written afterwards.
  bool finish();

 private:
  struct Freed {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void stop_being_direct();
  // Writes all of the bytes, in as many calls as that takes.
  bool write_out(std::span<const std::byte> bytes);

  int fd_;
  bool direct_ = false;
  std::unique_ptr<std::byte, Freed> buffer_;  // kBufferBytes, where direct_ was ever true
  std::size_t filled_ = 0;
};

DurableFile::DirectOutput::DirectOutput(int fd) : fd_(fd) {
  if (is_in_memory(fd)) return;
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kBufferBytes)));
  direct_ = buffer_ != nullptr && set_direct(fd, true);
}

void DurableFile::DirectOutput::stop_being_direct() {
  if (direct_) set_direct(fd_, false);
  direct_ = false;
}

bool DurableFile::DirectOutput::write_out(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && errno == EINVAL && direct_) {
      stop_being_direct();
      continue;
    }
    if (count < 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(count));
    // Cut short: the rest begins anywhere.
    if (bytes.size() % kBlockBytes != 0) stop_being_direct();
  }
  return true;
}

bool DurableFile::DirectOutput::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    if (!direct_ && filled_ == 0) return write_out(bytes);
    const std::size_t count = std::min(bytes.size(), kBufferBytes - filled_);
    std::memcpy(buffer_.get() + filled_, bytes.data(), count);
    filled_ += count;
    bytes = bytes.subspan(count);
    if (filled_ < kBufferBytes) continue;
    filled_ = 0;
    if (!write_out({buffer_.get(), kBufferBytes})) return false;
  }
  return true;
}

bool DurableFile::DirectOutput::finish() {
  const std::size_t whole = filled_ / kBlockBytes * kBlockBytes;
  const std::span<const std::byte> left(buffer_.get(), filled_);
  filled_ = 0;
  if (!write_out(left.first(whole))) return false;
  stop_being_direct();
  return write_out(left.subspan(whole));
}

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

void DurableFile::sync() {
  if ((!direct_ || direct_->finish()) && ::fsync(fd_) == 0) return;
  throw FileError("cannot write '{}': {}", path_.string(), std::strerror(errno));
}

void DurableFile::commit(Folder folder) {
  sync();
  // The descriptor is closed whether or not close() reports the loss.
  if (::close(std::exchange(fd_, -1)) != 0) {
    const int reason = errno;
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
