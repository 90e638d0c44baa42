#include <lockstep/observe/progress_bar.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include <lockstep/observe/terminal.h>

namespace lockstep::observe {

namespace {

constexpr int kShortestBar = 6;
constexpr int kLongestBar = 40;

constexpr std::string_view kPlain;
constexpr std::string_view kBold = "1";
constexpr std::string_view kDim = "2";
constexpr std::string_view kGreen = "32";
constexpr std::string_view kRed = "31";
constexpr std::string_view kCyan = "36";

// How many columns a text takes: one for each character.
int columns(std::string_view text) {
  return static_cast<int>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
}

std::string repeat(std::string_view text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all.append(text);
  return all;
}

std::string paint(std::string_view text, std::string_view sgr, Colour colour) {
  if (colour == Colour::none || sgr == kPlain || text.empty()) return std::string(text);
  return fmt::format("\x1b[{}m{}\x1b[0m", sgr, text);
}

double fraction(const Progress& progress, const ProgressContext& context) {
  if (context.total_steps <= 0) return 1;
  return std::clamp(static_cast<double>(progress.step) / static_cast<double>(context.total_steps),
                    0.0, 1.0);
}

// Rounded down, so that only the last step shows 100%.
int percent(const Progress& progress, const ProgressContext& context) {
  return static_cast<int>(std::floor(fraction(progress, context) * 100));
}

std::string time_text(const Progress& progress, const ProgressContext& context) {
  if (context.seconds_taken) return "took " + format_span(*context.seconds_taken);
  return "left " + (progress.seconds_left ? format_span(*progress.seconds_left) : "-:--");
}

// The part of the bar that is not done yet is dim where there is colour, else a thinner line.
std::string draw_bar(double done, int width, const LineStyle& style) {
  if (style.characters == Characters::ascii) {
    const int inside = width - 2;
    const int full = static_cast<int>(std::floor(done * inside));
    const bool tip = full < inside;
    return "[" + paint(repeat("=", full) + (tip ? ">" : ""), kCyan, style.colour) +
           paint(repeat(".", inside - full - (tip ? 1 : 0)), kDim, style.colour) + "]";
  }
  const bool coloured = style.colour != Colour::none;
  const int halves = static_cast<int>(std::floor(done * width * 2));
  const bool half = halves % 2 != 0;
  const std::string_view tip = coloured ? "╸" : "╾";
  return paint(repeat("━", halves / 2) + (half ? std::string(tip) : ""), kCyan, style.colour) +
         paint(repeat(coloured ? "━" : "─", width - halves / 2 - (half ? 1 : 0)), kDim,
               style.colour);
}

// A piece of the line. If the line is too long, pieces of the lowest rank are left out first.
struct Field {
  enum Rank : std::uint8_t { memory, peak, rate, bar, validation, percent, time, loss, step };
  Rank rank;
  std::string text;
  int width;
};

std::string loss_text(const Progress& progress, const ProgressContext& context,
                      const LineStyle& style) {
  std::string text =
      "loss " + paint(fmt::format("{:>5}", format_loss(progress.loss)), kBold, style.colour);
  if (style.characters == Characters::ascii) return text;
  switch (context.loss_trend) {
    case Trend::unknown: return text + "  ";
    case Trend::falling: return text + " " + paint("↓", kGreen, style.colour);
    case Trend::rising: return text + " " + paint("↑", kRed, style.colour);
  }
  return text;
}

int total_width(const std::vector<Field>& fields) {
  int total = 0;
  for (const auto& field : fields) total += field.width + 2;
  return total - 2;
}

}  // namespace

std::string format_loss(double loss) {
  if (!std::isfinite(loss)) return fmt::format("{}", loss);
  const double size = std::abs(loss);
  // Bounds are those of the rounded number: 9.9996 is written with as many digits as 10.
  if (size < 9.9995) return fmt::format("{:.3f}", loss);
  if (size < 99.995) return fmt::format("{:.2f}", loss);
  if (size < 999.95) return fmt::format("{:.1f}", loss);
  if (size < 99999.5) return fmt::format("{:.0f}", loss);
  return fmt::format("{:.1e}", loss);
}

std::string format_rate(double rate) {
  constexpr std::array<const char*, 5> kUnits = {"", "k", "M", "G", "T"};
  std::size_t unit = 0;
  for (; std::abs(rate) >= 999.5 && unit + 1 < kUnits.size(); ++unit) rate /= 1000;
  const double size = std::abs(rate);
  const int digits = size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}", rate, digits, kUnits[unit]);
}

std::string format_bytes(double bytes) {
  constexpr double kMiB = 1 << 20;
  if (bytes < 999.5 * kMiB) return fmt::format("{:.0f} MiB", bytes / kMiB);
  return fmt::format("{:.1f} GiB", bytes / kMiB / 1024);
}

std::string format_span(double seconds) {
  // More than a century, or not a number: unknown.
  if (!(seconds < 3600.0 * 24 * 36500)) return "-:--";
  const auto whole = static_cast<std::int64_t>(std::ceil(std::max(seconds, 0.0)));
  const auto minutes = whole / 60;
  const auto hours = minutes / 60;
  if (hours >= 100) return fmt::format("{}d {:02}h", hours / 24, hours % 24);
  if (hours > 0) return fmt::format("{}:{:02}:{:02}", hours, minutes % 60, whole % 60);
  return fmt::format("{}:{:02}", minutes, whole % 60);
}

std::string plain_line(const Progress& progress, const ProgressContext& context) {
  std::string line = fmt::format("step {}/{}  {}%  loss {}", progress.step, context.total_steps,
                                 percent(progress, context), format_loss(progress.loss));
  if (progress.validation_loss) line += "  val " + format_loss(*progress.validation_loss);
  if (progress.rate > 0)
    line += fmt::format("  {} {}", format_rate(progress.rate), context.rate_unit);
  if (progress.share_of_peak) line += fmt::format("  MFU {:.0f}%", *progress.share_of_peak * 100);
  if (progress.memory_bytes) line += "  " + format_bytes(*progress.memory_bytes);
  return line + "  " + time_text(progress, context);
}

std::string bar_line(const Progress& progress, const ProgressContext& context,
                     const LineStyle& style) {
  const int room = std::max(style.width - 1, 1);
  const auto total = std::to_string(context.total_steps);
  // Numbers are padded, so that the bar does not change its length with every digit.
  std::vector<Field> fields;
  const auto add = [&](Field::Rank rank, std::string text, int width) {
    fields.push_back({rank, std::move(text), width});
  };
  const auto add_text = [&](Field::Rank rank, std::string text) {
    const int width = columns(text);
    add(rank, std::move(text), width);
  };
  add_text(Field::step, fmt::format("step {:>{}}/{}", progress.step, total.size(), total));
  add(Field::bar, {}, kShortestBar);
  add_text(Field::percent, fmt::format("{:>3}%", percent(progress, context)));
  add(Field::loss, loss_text(progress, context, style),
      10 + (style.characters == Characters::unicode ? 2 : 0));
  if (progress.validation_loss)
    add_text(Field::validation, fmt::format("val {:>5}", format_loss(*progress.validation_loss)));
  if (progress.rate > 0)
    add_text(Field::rate, fmt::format("{:>5} {}", format_rate(progress.rate), context.rate_unit));
  if (progress.share_of_peak)
    add_text(Field::peak, fmt::format("MFU {:>2.0f}%", *progress.share_of_peak * 100));
  if (progress.memory_bytes)
    add_text(Field::memory, fmt::format("{:>8}", format_bytes(*progress.memory_bytes)));
  add_text(Field::time, fmt::format("{:<9}", time_text(progress, context)));

  while (fields.size() > 1 && total_width(fields) > room)
    fields.erase(std::ranges::min_element(fields, {}, &Field::rank));
  const int spare = room - total_width(fields);
  std::string line;
  for (auto& field : fields) {
    if (field.rank == Field::bar)
      field.text =
          draw_bar(fraction(progress, context), std::min(kShortestBar + spare, kLongestBar), style);
    if (!line.empty()) line += "  ";
    line += field.text;
  }
  // Only the step can still be too long, and it is ASCII.
  if (spare < 0) line.resize(static_cast<std::size_t>(room));
  return line;
}

namespace {

constexpr std::chrono::seconds kMemory(30);
constexpr std::string_view kEraseLine = "\r\x1b[K";
constexpr std::string_view kEraseBelow = "\r\x1b[J";

}  // namespace

ProgressDisplay::ProgressDisplay(Options options, Clock::time_point start)
    : options_(std::move(options)), start_(start), steps_(kMemory) {
  context_.total_steps = options_.total_steps;
  context_.rate_unit = options_.rate_unit;
}

std::string ProgressDisplay::update(const Progress& progress, int width, Clock::time_point now) {
  if (finished_) return {};
  // The first step is left out of the estimate: it includes everything that is done only once.
  if (latest_) {
    steps_.add(static_cast<double>(progress.step - latest_->step), now);
  } else {
    steps_.start(now);
  }
  follow_loss(progress.loss);
  latest_ = progress;
  if (!latest_->seconds_left && steps_.per_second() > 0)
    latest_->seconds_left =
        static_cast<double>(std::max<std::int64_t>(options_.total_steps - progress.step, 0)) /
        steps_.per_second();
  if (!due(now)) return {};
  shown_step_ = progress.step;
  shown_at_ = now;
  return draw(width);
}

bool ProgressDisplay::due(Clock::time_point now) const {
  if (!shown_step_) return true;
  // finish() writes the last step: it knows how long the run took.
  if (options_.kind == DisplayKind::live) return now - shown_at_ >= options_.redraw_interval;
  if (latest_->step >= options_.total_steps) return false;
  if (options_.plain_every_steps > 0)
    return latest_->step / options_.plain_every_steps > *shown_step_ / options_.plain_every_steps;
  return now - shown_at_ >= options_.plain_interval;
}

void ProgressDisplay::follow_loss(double loss) {
  if (!std::isfinite(loss)) return;
  ++num_losses_;
  // Plain means at first, so that the first losses do not count for ever.
  quick_loss_ += (loss - quick_loss_) / std::min(num_losses_, 10);
  slow_loss_ += (loss - slow_loss_) / std::min(num_losses_, 50);
  const double change = quick_loss_ - slow_loss_;
  if (num_losses_ <= 10 || change == 0) {
    context_.loss_trend = Trend::unknown;
  } else {
    context_.loss_trend = change < 0 ? Trend::falling : Trend::rising;
  }
}

// Erases only the bar's line, as text below it may not be ours; and the rest of the screen where
// the terminal became narrower, which broke the bar into several lines.
std::string_view ProgressDisplay::erase(int width) const {
  return width < drawn_width_ ? kEraseBelow : kEraseLine;
}

std::string ProgressDisplay::draw(int width) {
  if (options_.kind == DisplayKind::plain) return plain_line(*latest_, context_) + "\n";
  const LineStyle style{
      .width = width, .characters = options_.characters, .colour = options_.colour};
  std::string drawn(erase(width));
  drawn_width_ = width;
  return drawn + bar_line(*latest_, context_, style) + "\r";
}

std::string ProgressDisplay::note(std::string_view text, int width) {
  const bool live = options_.kind == DisplayKind::live && shown_step_ && !finished_;
  std::string written(live ? erase(width) : std::string_view());
  written.append(text);
  if (!text.ends_with('\n')) written.push_back('\n');
  if (live) written += draw(width);
  return written;
}

std::string ProgressDisplay::finish(int width, Clock::time_point now) {
  if (std::exchange(finished_, true) || !latest_) return {};
  context_.seconds_taken = std::chrono::duration<double>(now - start_).count();
  std::string written = draw(width);
  if (options_.kind == DisplayKind::live) written += "\n";
  return written;
}

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

// A descriptor of the same pipe or terminal that never blocks. It is opened again because
// O_NONBLOCK belongs to the open file, which the shell and others share. -1 where that is not
// possible.
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
  // A frame is dropped while many bytes wait: it would be old when it is shown.
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
  while (!pending_.empty() && error_ == 0 && !deadline.passed()) {
    pollfd wait{.fd = fd_, .events = POLLOUT, .revents = 0};
    ::poll(&wait, 1, deadline.poll_timeout());
    put({});
  }
}

int ProgressBar::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void ProgressBar::put(std::string_view text) {
  if (pending_.size() + text.size() <= kMostPending) pending_.append(text);
  while (!pending_.empty() && error_ == 0) {
    pollfd ready{.fd = fd_, .events = POLLOUT, .revents = 0};
    const int answer = ::poll(&ready, 1, 0);
    if (answer < 0 && errno == EINTR) continue;
    // poll() comes first because a write to a pipe without a reader ends the process.
    if (answer < 0)
      error_ = errno;
    else if ((ready.revents & (POLLERR | POLLHUP)) != 0)
      error_ = EPIPE;
    else if ((ready.revents & POLLNVAL) != 0)
      error_ = EBADF;
    if (error_ != 0 || (ready.revents & POLLOUT) == 0) break;
    // A stream that poll() calls writable takes this many bytes without blocking.
    const ssize_t taken =
        ::write(fd_, pending_.data(), std::min<std::size_t>(pending_.size(), PIPE_BUF));
    if (taken > 0) pending_.erase(0, static_cast<std::size_t>(taken));
    if (taken < 0 && errno == EAGAIN) break;
    if (taken < 0 && errno != EINTR) error_ = errno;
  }
  if (error_ != 0) pending_.clear();
}

}  // namespace lockstep::observe
