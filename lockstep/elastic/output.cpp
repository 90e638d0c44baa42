#include <lockstep/elastic/output.h>

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include <spdlog/fmt/fmt.h>

namespace lockstep::elastic {

namespace {

constexpr std::size_t kMostBacklog = 1 << 20;
constexpr std::size_t kTailBytes = 8 << 10;

}  // namespace

// O_NONBLOCK belongs to the open file, which the shell and others share; so pipes and terminals
// are opened anew. A regular file never blocks (and a second opening would have its own position).
Sink::Sink(int fd) : fd_(fd), largest_write_(1 << 18), terminal_(::isatty(fd) == 1) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    error_ = EPIPE;
  } else if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    own_ = net::Fd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
    if (own_) fd_ = own_.get();
  }
  // What poll(2) announces as writable takes this much of a pipe without blocking.
  if (!own_ && !S_ISREG(info.st_mode)) largest_write_ = PIPE_BUF;
}

void Sink::flush() {
  while (backlog() > 0) {
    const ssize_t put =
        ::write(fd_, pending_.data() + written_, std::min(backlog(), largest_write_));
    if (put > 0) {
      written_ += static_cast<std::size_t>(put);
      if (largest_write_ == PIPE_BUF) break;  // ask poll(2) again
    } else if (put < 0 && errno == EAGAIN) {
      break;
    } else if (put < 0 && errno != EINTR) {
      error_ = errno;
      written_ = pending_.size();
    }
  }
  if (written_ == pending_.size()) {
    pending_.clear();
    written_ = 0;
  } else if (written_ > kMostBacklog) {
    pending_.erase(0, written_);
    written_ = 0;
  }
}

void Tail::append(std::string_view text) {
  text_.append(text.substr(text.size() - std::min(text.size(), kTailBytes)));
  if (text_.size() > 2 * kTailBytes) text_.erase(0, text_.size() - kTailBytes);
}

std::vector<std::string> Tail::lines(std::size_t most) const {
  std::vector<std::string> found;
  std::string_view rest = text_;
  while (!rest.empty() && found.size() < most) {
    if (rest.back() == '\n') rest.remove_suffix(1);
    const auto start = rest.rfind('\n');
    const auto begin = start == std::string_view::npos ? 0 : start + 1;
    found.emplace_back(rest.substr(begin));
    rest = rest.substr(0, begin);
  }
  std::reverse(found.begin(), found.end());
  return found;
}

std::string line_prefix(int rank, int world_size, bool colour) {
  const auto width = std::to_string(world_size - 1).size();
  const std::string text = fmt::format("[{:>{}}]", rank, width);
  if (!colour) return text + " ";
  constexpr std::array kColours = {32, 33, 34, 35, 36, 92, 93, 94, 95, 96};
  return fmt::format("\x1b[{}m{}\x1b[0m ", kColours[static_cast<unsigned>(rank) % kColours.size()],
                     text);
}

RankStream::RankStream(net::Fd pipe, std::string prefix, Sink* sink, Tail* tail, net::Fd copy)
    : pipe_(std::move(pipe)),
      prefix_(std::move(prefix)),
      sink_(sink),
      tail_(tail),
      copy_(std::move(copy)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

bool RankStream::held_back() const { return sink_ != nullptr && sink_->backlog() > kMostBacklog; }

bool RankStream::read() {
  std::array<char, 64 << 10> buffer;
  const ssize_t got = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (got > 0) {
    take({buffer.data(), static_cast<std::size_t>(got)});
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (!partial_.empty()) emit({});
  pipe_.reset();
  return true;
}

void RankStream::take(std::string_view bytes) {
  // A copy that fails (disk full) loses the copy, never the rank.
  if (copy_ && ::write(copy_.get(), bytes.data(), bytes.size()) < 0 && errno != EINTR) {
    if (sink_ != nullptr)
      sink_->append(fmt::format("{}lockstep: the log file of this output ends here: {}\n", prefix_,
                                std::strerror(errno)));
    copy_.reset();
  }
  while (!bytes.empty()) {
    const auto newline = bytes.find('\n');
    if (newline == std::string_view::npos) {
      partial_.append(bytes);
      if (partial_.size() >= kLongestLine) emit({});
      return;
    }
    emit(bytes.substr(0, newline));
    bytes.remove_prefix(newline + 1);
  }
}

void RankStream::emit(std::string_view line) {
  if (sink_ != nullptr) {
    sink_->append(prefix_);
    sink_->append(partial_);
    sink_->append(line);
    sink_->append("\n");
  }
  if (!partial_.empty()) tail_->append(partial_);
  tail_->append(line);
  tail_->append("\n");
  partial_.clear();
}

}  // namespace lockstep::elastic
