#include <lockstep/observe/progress.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include <spdlog/fmt/fmt.h>

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

// Columns of a text, of which every character takes one.
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

// 100% is for the last step alone.
int percent(const Progress& progress, const ProgressContext& context) {
  return static_cast<int>(std::floor(fraction(progress, context) * 100));
}

std::string time_text(const Progress& progress, const ProgressContext& context) {
  if (context.seconds_taken) return "took " + format_span(*context.seconds_taken);
  return "left " + (progress.seconds_left ? format_span(*progress.seconds_left) : "-:--");
}

// In terminals with colour the rest of the bar is the same line, dimmer; in others a thinner one.
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

// One piece of the line. Those with the lowest rank go first where the line is too long.
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
  // Compared after rounding: 9.9996 is written with as many digits as 10.
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
  // A century is as good as for ever.
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
  // Padded, so that the bar does not change its length with every digit.
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

}  // namespace lockstep::observe
