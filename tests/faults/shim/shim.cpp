// Makes a machine's faults happen to a program that knows nothing of it, in front of the C library
// (LD_PRELOAD): clocks that are wrong, and disks that fail.
//
//   SHIM_CLOCK=3600        the wall clock is so many seconds ahead
//   SHIM_CLOCK_AFTER=2     … from so many seconds after the program's start on
//   SHIM_IO=EIO|ENOSPC|KILL  what becomes of a call that makes, writes, syncs, renames or removes a
//                          file or folder
//   SHIM_IO_PATH=text      … whose path has this in it
//   SHIM_IO_FILE=path      … while this file exists
//   SHIM_IO_CALL=12        … or the 12th of them, from 1
//   SHIM_IO_RANK=1         … in this rank of the job's first generation alone
//   SHIM_IO_LOG=path       … each of which is written down there, by its name
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>

namespace {

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

timespec clock_of_the_kernel(clockid_t clock) {
  timespec time{};
  ::syscall(SYS_clock_gettime, clock, &time);
  return time;
}

// ---- clocks

const timespec started = clock_of_the_kernel(CLOCK_MONOTONIC);

time_t ahead() {
  static const char* const seconds = ::getenv("SHIM_CLOCK");
  if (seconds == nullptr) return 0;
  static const char* const after = ::getenv("SHIM_CLOCK_AFTER");
  if (after != nullptr &&
      clock_of_the_kernel(CLOCK_MONOTONIC).tv_sec - started.tv_sec < ::atoi(after))
    return 0;
  return ::atoi(seconds);
}

// ---- disks

enum class Then { go_on, fail };

bool of_this_process() {
  static const bool value = [] {
    const char* const wanted = ::getenv("SHIM_IO_RANK");
    if (wanted == nullptr) return true;
    const char* const rank = ::getenv("RANK");
    const char* const generation = ::getenv("LOCKSTEP_GENERATION");
    return rank != nullptr && ::strcmp(rank, wanted) == 0 &&
           (generation == nullptr || ::strcmp(generation, "0") == 0);
  }();
  return value;
}

void write_down(const char* call, const char* path) {
  static const char* const log = ::getenv("SHIM_IO_LOG");
  if (log == nullptr) return;
  char line[PATH_MAX + 64];
  const int size = ::snprintf(line, sizeof line, "%s %s\n", call, path);
  const long fd = ::syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (fd < 0) return;
  ::syscall(SYS_write, fd, line, size);
  ::syscall(SYS_close, fd);
}

std::atomic<int> calls{0};

// Decides what happens to a call on this path.
Then meet(const char* call, const char* path) {
  static const char* const what = ::getenv("SHIM_IO");
  static const char* const part = ::getenv("SHIM_IO_PATH");
  if (what == nullptr || part == nullptr || ::strstr(path, part) == nullptr || !of_this_process())
    return Then::go_on;
  const int number = ++calls;
  write_down(call, path);
  static const char* const file = ::getenv("SHIM_IO_FILE");
  static const char* const wanted = ::getenv("SHIM_IO_CALL");
  if (file != nullptr && ::syscall(SYS_faccessat, AT_FDCWD, file, F_OK) != 0) return Then::go_on;
  if (wanted != nullptr && number != ::atoi(wanted)) return Then::go_on;
  if (::strcmp(what, "KILL") == 0) ::kill(::getpid(), SIGKILL);
  errno = ::strcmp(what, "ENOSPC") == 0 ? ENOSPC : EIO;
  return ::strcmp(what, "NOTHING") == 0 ? Then::go_on : Then::fail;
}

Then meet(const char* call, int fd) {
  char link[64], path[PATH_MAX];
  ::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = ::readlink(link, path, sizeof path - 1);
  if (size <= 0) return Then::go_on;
  path[size] = '\0';
  return meet(call, path);
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* time) {
  const long result = ::syscall(SYS_clock_gettime, clock, time);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    time->tv_sec += ahead();
  return static_cast<int>(result);
}

int gettimeofday(timeval* __restrict time, void* __restrict) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (time != nullptr) *time = {.tv_sec = now.tv_sec, .tv_usec = now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* result) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != nullptr) *result = now.tv_sec;
  return now.tv_sec;
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  if ((flags & O_CREAT) != 0 && meet("open", path) == Then::fail) return -1;
  static auto* const real = next<int(const char*, int, ...)>("open");
  return real(path, flags, mode);
}

int open64(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  const mode_t mode = va_arg(more, mode_t);
  va_end(more);
  if ((flags & O_CREAT) != 0 && meet("open", path) == Then::fail) return -1;
  static auto* const real = next<int(const char*, int, ...)>("open64");
  return real(path, flags, mode);
}

ssize_t write(int fd, const void* bytes, size_t size) {
  if (meet("write", fd) == Then::fail) return -1;
  return ::syscall(SYS_write, fd, bytes, size);
}

ssize_t writev(int fd, const iovec* parts, int count) {
  if (meet("writev", fd) == Then::fail) return -1;
  static auto* const real = next<ssize_t(int, const iovec*, int)>("writev");
  return real(fd, parts, count);
}

ssize_t pwrite(int fd, const void* bytes, size_t size, off_t offset) {
  if (meet("pwrite", fd) == Then::fail) return -1;
  static auto* const real = next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  return real(fd, bytes, size, offset);
}

int fsync(int fd) {
  if (meet("fsync", fd) == Then::fail) return -1;
  static auto* const real = next<int(int)>("fsync");
  return real(fd);
}

int fdatasync(int fd) {
  if (meet("fdatasync", fd) == Then::fail) return -1;
  static auto* const real = next<int(int)>("fdatasync");
  return real(fd);
}

int rename(const char* from, const char* to) noexcept {
  if (meet("rename", from) == Then::fail) return -1;
  static auto* const real = next<int(const char*, const char*)>("rename");
  return real(from, to);
}

int mkdir(const char* path, mode_t mode) noexcept {
  if (meet("mkdir", path) == Then::fail) return -1;
  static auto* const real = next<int(const char*, mode_t)>("mkdir");
  return real(path, mode);
}

int unlink(const char* path) noexcept {
  if (meet("unlink", path) == Then::fail) return -1;
  static auto* const real = next<int(const char*)>("unlink");
  return real(path);
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  if ((path[0] == '/' ? meet("unlinkat", path) : meet("unlinkat", folder)) == Then::fail) return -1;
  static auto* const real = next<int(int, const char*, int)>("unlinkat");
  return real(folder, path, flags);
}

}  // extern "C"
