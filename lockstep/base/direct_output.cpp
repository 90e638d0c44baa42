#include <lockstep/base/direct_output.h>

#include <fcntl.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/magic.h>
#include <sys/vfs.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>

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

DirectOutput::DirectOutput(int fd) : fd_(fd) {
  if (is_in_memory(fd)) return;
  buffer_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, kBufferBytes)));
  direct_ = buffer_ != nullptr && set_direct(fd, true);
}

void DirectOutput::stop_being_direct() {
  if (direct_) set_direct(fd_, false);
  direct_ = false;
}

bool DirectOutput::write_out(std::span<const std::byte> bytes) {
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

bool DirectOutput::write(std::span<const std::byte> bytes) {
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

bool DirectOutput::finish() {
  const std::size_t whole = filled_ / kBlockBytes * kBlockBytes;
  const std::span<const std::byte> left(buffer_.get(), filled_);
  filled_ = 0;
  if (!write_out(left.first(whole))) return false;
  stop_being_direct();
  return write_out(left.subspan(whole));
}

}  // namespace lockstep
