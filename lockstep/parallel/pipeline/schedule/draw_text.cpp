#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include <lockstep/parallel/pipeline/schedule/drawing.h>

namespace lockstep::pipeline {

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
    // In lines that the narrowest terminal has room for.
    if (!timeline_.one_clock)
      for (const char* line :
           {"not aligned: hosts' clocks differ, and", "each rank is from its own start"})
        text += fmt::format("{:<{}}  {}\n", "", label_width_, line);
    return text;
  }

 private:
  // As many for each time as long as the shortest, so that equal spans look equal.
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
    // Of measured spans a few are shorter than the rest, and may go without a letter.
    has_letters_ = room * sum / count / makespan_ >= 1;
    // Rounding must not lose a column of those that fit exactly.
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

  // How busy the rank is in each column, where what it does is too short for a letter.
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
