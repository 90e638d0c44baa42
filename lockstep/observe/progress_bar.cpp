#include <lockstep/observe/progress_bar.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <exception>

#include <lockstep/observe/terminal.h>

namespace lockstep::observe {

namespace {

constexpr std::size_t kMostPending = 64 << 10;
// How long finish() waits for a stream that takes nothing.
constexpr int kLastWordMilliseconds = 200;

ProgressDisplay::Options display_options(int fd, const ProgressBar::Options& options) {
  using Terminal = ProgressBar::Terminal;
  const bool live = options.terminal == Terminal::always ||
                    (options.terminal == Terminal::automatic && is_live_terminal(fd));
  return {.total_steps = options.total_steps,
          .rate_unit = options.rate_unit,
          .kind = live ? DisplayKind::live : DisplayKind::plain,
          .characters = live ? locale_characters() : Characters::ascii,
          .colour = live ? wanted_colour() : Colour::none,
          .plain_interval = options.plain_interval,
          .plain_every_steps = options.plain_every_steps};
}

// A descriptor that never blocks: O_NONBLOCK belongs to the open file, which the shell and others
// share, so pipes and terminals are opened anew. -1 where that cannot be.
int reopen(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !(S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode))) return -1;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
}

}  // namespace

ProgressBar::ProgressBar(int fd, const Options& options)
    : fd_(fd),
      own_fd_(reopen(fd)),
      width_(options.width),
      display_(display_options(fd, options), Clock::now()) {
  if (own_fd_ >= 0) fd_ = own_fd_;
}

ProgressBar::~ProgressBar() {
  try {
    finish();
  } catch (const std::exception&) {  // no memory for a last line
  }
  if (own_fd_ >= 0) ::close(own_fd_);
}

int ProgressBar::width() const { return width_ > 0 ? width_ : terminal_width(fd_); }

void ProgressBar::update(const Progress& progress) {
  const std::lock_guard lock(mutex_);
  const std::string frame = display_.update(progress, width(), Clock::now());
  // A frame that would only queue up behind others is not worth queueing.
  if (pending_.size() < PIPE_BUF) pending_ += frame;
  put({});
}

void ProgressBar::note(std::string_view text) {
  const std::lock_guard lock(mutex_);
  put(display_.note(text, width()));
}

void ProgressBar::finish() {
  const std::lock_guard lock(mutex_);
  put(display_.finish(width(), Clock::now()));
  const auto deadline = Deadline::after(milliseconds(kLastWordMilliseconds));
  while (!pending_.empty() && !lost_ && !deadline.passed()) {
    pollfd wait{.fd = fd_, .events = POLLOUT, .revents = 0};
    ::poll(&wait, 1, deadline.poll_timeout());
    put({});
  }
}

void ProgressBar::put(std::string_view text) {
  if (pending_.size() + text.size() <= kMostPending) pending_.append(text);
  while (!pending_.empty() && !lost_) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    const int answer = ::poll(&ready, 1, 0);
    if (answer < 0 && errno == EINTR) continue;
    // Asked first, because a write to a pipe without a reader ends the process.
    lost_ = answer < 0 || (ready.revents & (POLLERR | POLLHUP | POLLNVAL)) != 0;
    if (lost_ || (ready.revents & POLLOUT) == 0) break;
    // What poll(2) announces as writable takes this much without blocking.
    const ssize_t taken =
        ::write(fd_, pending_.data(), std::min<std::size_t>(pending_.size(), PIPE_BUF));
    if (taken > 0) pending_.erase(0, static_cast<std::size_t>(taken));
    if (taken < 0 && errno == EAGAIN) break;
    if (taken < 0 && errno != EINTR) lost_ = true;
  }
  if (lost_) pending_.clear();
}

}  // namespace lockstep::observe
