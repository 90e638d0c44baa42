#include <lockstep/parallel/pipeline/schedule/drawing.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <span>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include <lockstep/observe/svg.h>

namespace lockstep::pipeline {

namespace {

using observe::Anchor;
using observe::SvgWriter;

constexpr double kLeft = 84;
constexpr double kTop = 112;
constexpr double kRightMargin = 28;
constexpr double kNarrowest = 848;  // width of the rows
constexpr double kWidest = 2400;
constexpr double kSpanWidth = 17;  // width of a span where there is room for all
constexpr double kRowHeight = 34;
constexpr double kRowGap = 6;

constexpr std::string_view kInk = "#1f2933";
constexpr std::string_view kSoftInk = "#5b6774";
constexpr std::string_view kGrid = "#e6e9ee";
constexpr std::string_view kIdle = "#eceff3";

struct Rgb {
  int red, green, blue;
};
constexpr Rgb kForward = {37, 99, 235};
constexpr Rgb kBackward = {228, 87, 46};
constexpr Rgb kWeight = {15, 148, 130};

Rgb colour_of(ActionKind kind) {
  if (kind == ActionKind::forward) return kForward;
  return kind == ActionKind::backward_weight ? kWeight : kBackward;
}

// A rank's first stage has the colour itself; later stages are mixed with more and more white.
std::string shade(const Rgb& colour, int chunk, int num_chunks) {
  const double white = num_chunks > 1 ? 0.62 * chunk / (num_chunks - 1) : 0;
  const auto mix = [&](int part) {
    return static_cast<int>(std::lround(part + white * (255 - part)));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(colour.red), mix(colour.green), mix(colour.blue));
}

// The stages that a rank computed.
std::vector<int> stages_in(const std::vector<Span>& spans) {
  std::set<int> stages;
  for (const Span& span : spans) stages.insert(span.action.stage);
  return {stages.begin(), stages.end()};
}

int most_chunks(const Timeline& timeline) {
  std::size_t most = 1;
  for (const auto& spans : timeline.ranks) most = std::max(most, stages_in(spans).size());
  return static_cast<int>(most);
}

double most_digits(const Timeline& timeline) {
  int largest = 0;
  for (const auto& spans : timeline.ranks)
    for (const Span& span : spans) largest = std::max(largest, span.action.micro_batch);
  return static_cast<double>(std::to_string(largest).size());
}

bool has_kind(const Timeline& timeline, ActionKind kind) {
  return std::ranges::any_of(timeline.ranks, [&](const auto& spans) {
    return std::ranges::any_of(spans, [&](const Span& span) { return span.action.kind == kind; });
  });
}

class TimelineDrawing {
 public:
  explicit TimelineDrawing(const Timeline& timeline, const SvgText& text)
      : timeline_(timeline),
        text_(text),
        num_chunks_(most_chunks(timeline)),
        most_digits_(most_digits(timeline)),
        start_(timeline.start()),
        makespan_(timeline.makespan() > 0 ? timeline.makespan() : 1),
        width_(rows_width()),
        bottom_(kTop + static_cast<double>(timeline.ranks.size()) * (kRowHeight + kRowGap)),
        svg_(kLeft + width_ + kRightMargin, bottom_ + 62, "#ffffff") {}

  std::string draw() {
    const double room = width_;
    // A rank's wait before its first action is part of the bubble.
    const std::string idle = timeline_.one_clock
                                 ? fmt::format("bubble {:.1f} %", 100 * bubble(timeline_))
                                 : fmt::format("idle {:.1f} % between ranks' own ends",
                                               100 * bubble_between_own_ends(timeline_));
    svg_.text({kLeft, 38}, observe::shortened(fmt::format("{} · {}", text_.title, idle), 20, room),
              {.colour = kInk, .size = 20, .weight = observe::Weight::bold});
    svg_.text({kLeft, 60}, observe::shortened(text_.subtitle, 14, room),
              {.colour = kSoftInk, .size = 14});
    draw_legend();
    draw_axis();
    for (std::size_t rank = 0; rank < timeline_.ranks.size(); ++rank) draw_row(rank);
    return svg_.document();
  }

 private:
  // The rank with the most actions decides.
  double rows_width() const {
    std::size_t most = 0;
    for (const auto& spans : timeline_.ranks) most = std::max(most, spans.size());
    return std::clamp(kSpanWidth * static_cast<double>(most), kNarrowest, kWidest);
  }
  double x(double time) const { return kLeft + (time - start_) / makespan_ * width_; }
  std::string colour(ActionKind kind, int chunk) const {
    return shade(colour_of(kind), chunk, num_chunks_);
  }

  void draw_row(std::size_t rank) {
    const double top = kTop + static_cast<double>(rank) * (kRowHeight + kRowGap);
    const double bottom = top + kRowHeight;
    svg_.text({kLeft - 12, (top + bottom) / 2 + 5}, fmt::format("rank {}", rank),
              {.colour = kInk, .size = 14, .anchor = Anchor::end});
    svg_.rectangle({kLeft, top, kLeft + width_, bottom}, kIdle, 4);
    const auto stages = stages_in(timeline_.ranks[rank]);
    for (const Span& span : timeline_.ranks[rank]) {
      const double left = x(span.start);
      const double right = x(span.end);
      const double gap = right - left > 4 ? 0.6 : 0;
      const int chunk =
          static_cast<int>(std::ranges::find(stages, span.action.stage) - stages.begin());
      svg_.rectangle({left + gap, top, right - gap, bottom}, colour(span.action.kind, chunk),
                     gap > 0 ? 2.5 : 0);
      draw_number(span, chunk, (left + right) / 2, right - left, (top + bottom) / 2);
    }
  }

  void draw_number(const Span& span, int chunk, double x, double room, double y) {
    // All numbers have one size, however many digits they have.
    const double size = std::min(13.0, (room - 3) / (0.58 * most_digits_));
    if (size < 7) return;
    const bool light = num_chunks_ > 1 && 2 * chunk >= num_chunks_;
    svg_.text({x, y + 0.36 * size}, std::to_string(span.action.micro_batch),
              {.colour = light ? kInk : "#ffffff", .size = size, .anchor = Anchor::middle});
  }

  void draw_axis() {
    const auto axis = observe::Axis::linear(0, makespan_);
    for (const auto& tick : axis.ticks()) {
      if (tick.value < 0 || tick.value > makespan_ * (1 + 1e-9)) continue;
      const double at = x(start_ + tick.value);
      svg_.line({at, kTop - 6}, {at, bottom_}, {.colour = kGrid, .width = 1});
      svg_.text({at, bottom_ + 16}, tick.label,
                {.colour = kSoftInk, .size = 13, .anchor = Anchor::middle});
    }
    std::string label = "time";
    if (!text_.time_unit.empty()) label += fmt::format(" ({})", text_.time_unit);
    if (!timeline_.one_clock)
      label += " from each rank's own start: not aligned, as their hosts' clocks differ";
    svg_.text({kLeft + width_ / 2, bottom_ + 42}, label,
              {.colour = kInk, .size = 14, .anchor = Anchor::middle});
  }

  void draw_legend() {
    struct Entry {
      ActionKind kind;
      const char* label;
    };
    constexpr std::array<Entry, 4> kEntries = {
        {{ActionKind::forward, "forward"},
         {ActionKind::backward, "backward"},
         {ActionKind::backward_input, "backward: input"},
         {ActionKind::backward_weight, "backward: weights"}}};
    double at = kLeft;
    const double y = kTop - 24;
    const auto write = [&](std::string_view label) {
      svg_.text({at + 8, y + 1}, label, {.colour = kInk, .size = 13});
      at += 8 + observe::estimated_width(label, 13) + 22;
    };
    const auto box = [&](double width, std::string_view fill) {
      svg_.rectangle({at, y - 11, at + width, y + 3}, fill, 2.5);
      at += width;
    };
    for (const auto& [kind, label] : kEntries) {
      if (!has_kind(timeline_, kind)) continue;
      for (int chunk = 0; chunk < num_chunks_; ++chunk)
        box(num_chunks_ > 1 ? 10 : 16, colour(kind, chunk));
      write(label);
    }
    box(16, kIdle);
    write("idle");
    if (num_chunks_ > 1)
      svg_.text({at, y + 1}, "lighter: a rank's later stages", {.colour = kSoftInk, .size = 13});
  }

  const Timeline& timeline_;
  const SvgText& text_;
  int num_chunks_;
  double most_digits_;  // the digits of the largest micro-batch's number
  double start_;
  double makespan_;
  double width_;
  double bottom_;
  SvgWriter svg_;
};

}  // namespace

std::string draw_svg(const Timeline& timeline, const SvgText& text) {
  return TimelineDrawing(timeline, text).draw();
}

namespace {

constexpr int kFewestColumns = 40;

char letter_of(ActionKind kind) { return to_text({kind, 0, 0}).front(); }

std::string_view escape_of(ActionKind kind) {
  if (kind == ActionKind::forward) return "\x1b[97;44m";
  return kind == ActionKind::backward_weight ? "\x1b[30;42m" : "\x1b[30;43m";
}

class Rows {
 public:
  Rows(const Timeline& timeline, const TextStyle& style)
      : timeline_(timeline),
        style_(style),
        unicode_(style.characters == observe::Characters::unicode),
        label_width_(static_cast<int>(
            fmt::format("rank {}", std::max<std::size_t>(timeline.ranks.size(), 1) - 1).size())),
        makespan_(timeline.makespan()),
        columns_(fit(std::max(style.width, kFewestColumns) - label_width_ - 2)) {}

  std::string draw() const {
    std::string text;
    for (std::size_t rank = 0; rank < timeline_.ranks.size(); ++rank) {
      const auto& spans = timeline_.ranks[rank];
      text += fmt::format("{:<{}}  {}\n", fmt::format("rank {}", rank), label_width_,
                          has_letters_ ? letters(spans) : shades(spans));
    }
    text += fmt::format("{:<{}}  {}\n", "", label_width_, legend());
    // Lines are short enough for the narrowest terminal.
    if (!timeline_.one_clock)
      for (const char* line :
           {"not aligned: hosts' clocks differ, and", "each rank is from its own start"})
        text += fmt::format("{:<{}}  {}\n", "", label_width_, line);
    return text;
  }

 private:
  // How many columns to use: a multiple for each shortest span, so that equal spans look equal.
  int fit(int room) {
    double shortest = std::numeric_limits<double>::infinity();
    double sum = 0;
    int count = 0;
    for (const auto& spans : timeline_.ranks)
      for (const Span& span : spans) {
        if (!(span.end > span.start)) continue;
        shortest = std::min(shortest, span.end - span.start);
        sum += span.end - span.start;
        ++count;
      }
    if (count == 0) return room;
    // The mean decides: a few measured spans are much shorter, and may go without a letter.
    has_letters_ = room * sum / count / makespan_ >= 1;
    // A number of columns that fits exactly must not be rounded down.
    const double each = std::floor(room * shortest / makespan_ + 1e-6);
    if (!(each >= 1)) return room;
    return std::min(room, static_cast<int>(std::lround(each * makespan_ / shortest)));
  }
  int column(double time) const {
    if (!(makespan_ > 0)) return 0;
    const double share = std::clamp((time - timeline_.start()) / makespan_, 0.0, 1.0);
    return static_cast<int>(std::lround(share * columns_));
  }

  std::string repeated(std::string_view glyph, int times) const {
    std::string text;
    for (int i = 0; i < times; ++i) text += glyph;
    return text;
  }
  std::string idle(int width) const { return repeated(unicode_ ? "·" : ".", width); }

  std::string letters(std::span<const Span> spans) const {
    std::string text;
    int at = 0;
    for (const Span& span : spans) {
      const int from = std::max(at, column(span.start));
      const int to = column(span.end);
      if (to <= from) continue;
      text += idle(from - at) + cell(span.action, to - from);
      at = to;
    }
    return text + idle(columns_ - at);
  }

  std::string cell(const Action& action, int width) const {
    std::string text(1, letter_of(action.kind));
    const std::string number = std::to_string(action.micro_batch);
    if (static_cast<int>(number.size()) < width) text += number;
    const int rest = width - static_cast<int>(text.size());
    if (style_.colour == observe::Colour::none) return text + repeated(unicode_ ? "─" : "-", rest);
    return fmt::format("{}{}{}\x1b[0m", escape_of(action.kind), text, repeated(" ", rest));
  }

  // How busy the rank is in each column, for actions that are too short for a letter.
  std::string shades(std::span<const Span> spans) const {
    std::vector<double> busy(static_cast<std::size_t>(columns_));
    const double each = makespan_ / columns_;
    for (const Span& span : spans) {
      const double start = (span.start - timeline_.start()) / each;
      const double end = (span.end - timeline_.start()) / each;
      for (auto at = static_cast<std::size_t>(std::max(start, 0.0)); at < busy.size(); ++at) {
        const auto left = static_cast<double>(at);
        if (left >= end) break;
        busy[at] += std::min(end, left + 1) - std::max(start, left);
      }
    }
    std::string text;
    for (const double share : busy)
      text += shade_glyph(std::clamp(static_cast<int>(std::lround(4 * share)), 0, 4));
    return text;
  }
  std::string shade_glyph(int quarters) const {
    constexpr std::string_view kUnicode[] = {"·", "░", "▒", "▓", "█"};
    constexpr std::string_view kAscii[] = {".", ":", "+", "*", "#"};
    return std::string(unicode_ ? kUnicode[quarters] : kAscii[quarters]);
  }

  std::string legend() const {
    if (!has_letters_)
      return fmt::format("{} idle, {}{}{} in part, {} busy: too much for a letter each", idle(1),
                         shade_glyph(1), shade_glyph(2), shade_glyph(3), shade_glyph(4));
    bool split = false;
    for (const auto& spans : timeline_.ranks)
      split |= std::ranges::any_of(
          spans, [](const Span& span) { return span.action.kind == ActionKind::backward_weight; });
    return fmt::format("F forward, {}, {} idle",
                       split ? "I backward (input), W backward (weights)" : "B backward", idle(1));
  }

  const Timeline& timeline_;
  const TextStyle& style_;
  bool unicode_;
  int label_width_;
  double makespan_;
  bool has_letters_ = true;
  int columns_;
};

}  // namespace

std::string draw_text(const Timeline& timeline, const TextStyle& style) {
  return Rows(timeline, style).draw();
}

}  // namespace lockstep::pipeline
