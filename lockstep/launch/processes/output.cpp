#include <lockstep/launch/processes/output.h>

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <spdlog/fmt/fmt.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include <lockstep/base/environment.h>
#include <lockstep/base/error.h>
#include <lockstep/net/socket.h>

namespace lockstep::launch {

namespace fs = std::filesystem;

namespace {

bool parse_whole(std::string_view text, int highest, int& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && value >= 0 && value <= highest;
}

}  // namespace

StreamChoice StreamChoice::parse(const std::string& text, const std::string& flag, int num_ranks) {
  StreamChoice choice;
  int streams = 0;
  if (parse_whole(text, 3, streams)) {
    choice.all_ = static_cast<Streams>(streams);
    return choice;
  }
  std::istringstream entries(text);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const auto colon = entry.find(':');
    int rank = 0;
    if (colon == std::string::npos || !parse_whole(entry.substr(0, colon), 1 << 20, rank) ||
        !parse_whole(entry.substr(colon + 1), 3, streams))
      throw UsageError("{}: '{}' is neither a number from 0 to 3 (0 none, 1 standard output, 2 "
                       "standard error, 3 both) nor a list such as 0:1,1:3 by local rank",
                       flag, text);
    if (rank >= num_ranks)
      throw UsageError("{}: '{}' names local rank {}, and this host runs {} rank{}: they are "
                       "numbered from 0 to {}",
                       flag, text, rank, num_ranks, num_ranks == 1 ? "" : "s", num_ranks - 1);
    if (!choice.by_rank_.emplace(rank, static_cast<Streams>(streams)).second)
      throw UsageError("{}: '{}' names local rank {} twice", flag, text, rank);
  }
  return choice;
}

bool StreamChoice::includes(int local_rank, Streams stream) const {
  const auto found = by_rank_.find(local_rank);
  const Streams chosen = found != by_rank_.end() ? found->second : all_;
  return (static_cast<int>(chosen) & static_cast<int>(stream)) != 0;
}

bool StreamChoice::any() const {
  bool some = all_ != Streams::none;
  for (const auto& [rank, streams] : by_rank_) some |= streams != Streams::none;
  return some;
}

fs::path make_log_directory(const std::string& base, const std::string& run_id) {
  std::error_code failed;
  const fs::path parent = base.empty() ? temporary_directory() : base;
  fs::create_directories(parent, failed);
  std::string folder = run_id;  // which users choose, and which need not be a valid file name
  std::replace(folder.begin(), folder.end(), '/', '_');
  std::string name = (parent / (folder + "_XXXXXX")).string();
  if (failed || ::mkdtemp(name.data()) == nullptr)
    throw UsageError("cannot make a folder for logs in '{}': {}; check --log-dir", parent.string(),
                     failed ? failed.message() : std::strerror(errno));
  return name;
}

namespace {

constexpr int kPipeBytes = 1 << 20;  // a rank that writes much then seldom waits for us

net::Fd open_log(const fs::path& path) {
  std::error_code failed;
  fs::create_directories(path.parent_path(), failed);
  if (failed)
    throw UsageError("cannot make a folder for logs in '{}': {}; check --log-dir",
                     path.parent_path().string(), failed.message());
  net::Fd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644));
  if (!file)
    throw UsageError("cannot write the log file '{}': {}", path.string(), std::strerror(errno));
  return file;
}

Plumbing lay_stream(const fs::path& log, bool redirected, bool teed) {
  Plumbing plumbing;
  if (redirected || teed) plumbing.file = {.path = log, .by_rank = !teed};
  if (redirected && !teed) {
    plumbing.rank_end = open_log(log);
    return plumbing;
  }
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw UsageError("cannot make a pipe: {}; raise 'ulimit -n' or run fewer ranks",
                     std::strerror(errno));
  plumbing.our_end = net::Fd(ends[0]);
  plumbing.rank_end = net::Fd(ends[1]);
  ::fcntl(ends[0], F_SETPIPE_SZ, kPipeBytes);  // may fail: users have a limit on such memory
  if (teed) plumbing.copy = open_log(log);
  return plumbing;
}

}  // namespace

std::array<Plumbing, 2> lay_streams(const fs::path& folder, int local_rank,
                                    const StreamChoices& choices) {
  constexpr std::array kStreams = {Streams::output, Streams::error};
  constexpr std::array kFiles = {"stdout.log", "stderr.log"};
  std::array<Plumbing, 2> both;
  for (std::size_t i = 0; i < both.size(); ++i)
    both[i] = lay_stream(folder / kFiles[i], choices.redirects.includes(local_rank, kStreams[i]),
                         choices.tee.includes(local_rank, kStreams[i]));
  return both;
}

namespace {

constexpr std::size_t kMostBacklog = 1 << 20;
constexpr std::size_t kTailBytes = 8 << 10;
// How much of an incomplete line is shown again on a terminal.
constexpr std::size_t kMostRedrawn = 4 << 10;
// How often an incomplete line is shown.
constexpr milliseconds kShowEvery(100);
// Other streams wait for the end of a long line, unless it has not grown for so long or is endless.
constexpr milliseconds kLongestSilence(5000);
constexpr std::size_t kEndlessLine = 64 << 20;

}  // namespace

// O_NONBLOCK belongs to the open file, which the shell and others share; so pipes and terminals are
// opened again. A regular file never blocks, and opened again it would have another position.
Sink::Sink(int fd) : fd_(fd), largest_write_(1 << 18), terminal_(::isatty(fd) == 1) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    error_ = EPIPE;
  } else if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
    const std::string path = fmt::format("/proc/self/fd/{}", fd);
    own_ = net::Fd(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY));
    if (own_) fd_ = own_.get();
  }
  // A pipe that poll(2) calls writable takes this much without blocking.
  if (!own_ && !S_ISREG(info.st_mode)) largest_write_ = PIPE_BUF;
}

void Sink::append(std::string_view lines) {
  if (open_line_ != 0 && !terminal_) {
    take("\n");
    open_line_ = 0;
  } else if (drawn_) {
    take("\r\x1b[K");
    drawn_ = false;
  }
  take(lines);
}

bool Sink::line_goes_on(Clock::time_point now) const {
  return open_line_ != 0 && open_bytes_ < kEndlessLine && now - grew_ < kLongestSilence;
}

void Sink::line_grew(std::size_t bytes) {
  open_bytes_ += bytes;
  grew_ = Clock::now();
}

void Sink::show(int stream, std::string_view part) {
  if (open_line_ != stream) {
    append({});
    open_line_ = stream;
    open_bytes_ = 0;
    open_text_.clear();
  }
  // Only what follows the last carriage return can be seen of the line.
  if (const auto anew = part.rfind('\r'); anew != std::string_view::npos)
    open_text_ = part.substr(anew + 1);
  else
    open_text_ += part;
  if (open_text_.size() > kMostRedrawn) open_text_.erase(0, open_text_.size() - kMostRedrawn);
  if (!terminal_ || drawn_) take(part);
  if (terminal_ && !drawn_) take(open_text_);
  drawn_ = terminal_;
}

void Sink::complete(std::string_view rest) {
  if (terminal_ && !drawn_) take(open_text_);
  take(rest);
  open_line_ = 0;
  drawn_ = false;
}

void Sink::flush() {
  if (open_line_ != 0 && terminal_ && !drawn_) {
    take(open_text_);
    drawn_ = true;
  }
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

void Sink::flush(const Deadline& deadline) {
  for (flush(); backlog() > 0; flush())
    if (!net::wait_ready(fd_, POLLOUT, deadline)) return;
}

void Tail::append(std::string_view text) {
  text_.append(text.substr(text.size() - std::min(text.size(), kTailBytes)));
  if (text_.size() > 2 * kTailBytes) text_.erase(0, text_.size() - kTailBytes);
}

void Tail::append_end_of(const fs::path& file) {
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  const std::streamoff size = stream ? static_cast<std::streamoff>(stream.tellg()) : 0;
  stream.seekg(std::max<std::streamoff>(size - static_cast<std::streamoff>(kTailBytes), 0));
  std::string end{std::istreambuf_iterator<char>(stream), {}};
  if (!end.empty() && !end.ends_with('\n')) end += '\n';
  append(end);
}

std::vector<std::string> Tail::lines(std::size_t most) const {
  std::vector<std::string> found;
  std::string_view rest = text_;
  while (!rest.empty() && found.size() < most) {
    if (rest.back() == '\n') rest.remove_suffix(1);
    const auto start = rest.rfind('\n');
    const auto begin = start == std::string_view::npos ? 0 : start + 1;
    // Only the text after the last carriage return could be seen at the end.
    std::string_view line = rest.substr(begin);
    if (line.ends_with('\r')) line.remove_suffix(1);
    found.emplace_back(line.substr(line.rfind('\r') + 1));
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

RankStream::RankStream(net::Fd pipe, std::string prefix, Sink& sink, Incomplete incomplete,
                       Tail* tail, net::Fd copy)
    : pipe_(std::move(pipe)),
      prefix_(std::move(prefix)),
      sink_(&sink),
      id_(sink.add_stream()),
      incomplete_(incomplete),
      tail_(tail),
      copy_(std::move(copy)) {
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

bool RankStream::held_back() const { return sink_->backlog() > kMostBacklog; }

bool RankStream::waits_for_line(Clock::time_point now) const {
  return incomplete_ == Incomplete::held && !is_open() && sink_->line_goes_on(now);
}

bool RankStream::read() {
  std::array<char, 64 << 10> buffer;
  const ssize_t got = ::read(pipe_.get(), buffer.data(), buffer.size());
  if (got > 0) {
    take({buffer.data(), static_cast<std::size_t>(got)});
    return true;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (!partial_.empty() || is_open()) emit({});
  pipe_.reset();
  return true;
}

void RankStream::take(std::string_view bytes) {
  // A copy that fails (disk full) loses the copy, never the rank.
  if (copy_ && ::write(copy_.get(), bytes.data(), bytes.size()) < 0 && errno != EINTR) {
    sink_->append(fmt::format("{}lockstep: the log file of this output ends here: {}\n", prefix_,
                              std::strerror(errno)));
    copy_.reset();
  }
  while (!bytes.empty()) {
    const auto newline = bytes.find('\n');
    if (newline == std::string_view::npos) {
      partial_.append(bytes);
      if (!unshown_since_) unshown_since_ = Clock::now();
      if (partial_.size() >= kLongestLine) show();
      if (is_open()) sink_->line_grew(bytes.size());
      return;
    }
    emit(bytes.substr(0, newline));
    bytes.remove_prefix(newline + 1);
  }
}

std::string RankStream::with_prefixes(std::string_view text) const {
  std::string result;
  for (auto at = text.find('\r'); at != std::string_view::npos && at + 1 < text.size();
       at = text.find('\r')) {
    result.append(text.substr(0, at + 1)).append(prefix_);
    text.remove_prefix(at + 1);
  }
  return result.append(text);
}

void RankStream::emit(std::string_view line) {
  // On a terminal, a line that had to make room for others is shown again from its beginning.
  const std::size_t from = is_open() || !sink_->terminal() ? shown_ : 0;
  const std::string rest = with_prefixes(partial_.substr(from).append(line)) + "\n";
  if (is_open())
    sink_->complete(rest);
  else
    sink_->append(prefix_ + rest);
  tail_->append(partial_);
  tail_->append(line);
  tail_->append("\n");
  partial_.clear();
  shown_ = 0;
  unshown_since_.reset();
}

void RankStream::show_incomplete(Clock::time_point now) {
  if (incomplete_ == Incomplete::shown && unshown_since_ && now - *unshown_since_ >= kShowEvery)
    show();
}

void RankStream::show() {
  unshown_since_.reset();
  if (!is_open()) {
    // On a terminal the whole line is shown again; elsewhere its beginning stands above.
    if (!sink_->terminal()) partial_.erase(0, shown_);
    shown_ = 0;
  }
  // Whether a carriage return begins the line anew depends on what comes next.
  const std::size_t whole = partial_.size() - (partial_.ends_with('\r') ? 1 : 0);
  if (whole <= shown_) return;
  const std::string part = with_prefixes(std::string_view(partial_).substr(shown_, whole - shown_));
  sink_->show(id_, is_open() ? part : prefix_ + part);
  shown_ = whole;
  const auto anew = partial_.rfind('\r', whole - 1);
  const std::size_t over = std::max(anew == std::string::npos ? 0 : anew + 1,
                                    whole > kMostRedrawn ? whole - kMostRedrawn : 0);
  partial_.erase(0, over);
  shown_ -= over;
}

}  // namespace lockstep::launch
