#include <lockstep/observe/progress_display.h>

#include <algorithm>
#include <utility>

namespace lockstep::observe {

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
  // The first step is left out of the estimate: it pays for everything that happens once.
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
  // The last step is for finish(), which knows how long it all took.
  if (options_.kind == DisplayKind::live) return now - shown_at_ >= options_.redraw_interval;
  if (latest_->step >= options_.total_steps) return false;
  if (options_.plain_every_steps > 0)
    return latest_->step / options_.plain_every_steps > *shown_step_ / options_.plain_every_steps;
  return now - shown_at_ >= options_.plain_interval;
}

void ProgressDisplay::follow_loss(double loss) {
  if (!std::isfinite(loss)) return;
  ++num_losses_;
  // Plain means at first, so that the start does not weigh for ever.
  quick_loss_ += (loss - quick_loss_) / std::min(num_losses_, 10);
  slow_loss_ += (loss - slow_loss_) / std::min(num_losses_, 50);
  const double change = quick_loss_ - slow_loss_;
  if (num_losses_ <= 10 || change == 0) {
    context_.loss_trend = Trend::unknown;
  } else {
    context_.loss_trend = change < 0 ? Trend::falling : Trend::rising;
  }
}

// What else stands below the bar is not its own; but a bar that became too long for its terminal
// was broken into several lines.
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

}  // namespace lockstep::observe
