#include <lockstep/observe/svg.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include <spdlog/fmt/fmt.h>

namespace lockstep::observe {

namespace {

// Length of the UTF-8 sequence at the start of `text`; 0 where there is none that is well formed.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return 1;
  const std::size_t length = lead >= 0xc2 && lead < 0xe0   ? 2
                             : lead >= 0xe0 && lead < 0xf0 ? 3
                             : lead >= 0xf0 && lead < 0xf5 ? 4
                                                           : 0;
  if (length == 0 || text.size() < length) return 0;
  std::uint32_t code = lead & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  constexpr std::uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  const bool no_character = code == 0xfffe || code == 0xffff || code > 0x10ffff;
  return code < kLeast[length] || surrogate || no_character ? 0 : length;
}

std::string dash_attribute(const Stroke& stroke) {
  return stroke.dashes.empty() ? "" : fmt::format(" stroke-dasharray=\"{}\"", stroke.dashes);
}

}  // namespace

double estimated_width(std::string_view text, double size) {
  const auto characters = std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
  return 0.56 * size * static_cast<double>(characters);
}

std::string shortened(std::string_view text, double size, double room) {
  if (estimated_width(text, size) <= room) return std::string(text);
  std::string_view kept = text;
  do {
    kept.remove_suffix(1);
  } while (!kept.empty() && estimated_width(kept, size) + size > room);
  // Whole characters only.
  while (!kept.empty() && (static_cast<unsigned char>(text[kept.size()]) & 0xc0) == 0x80)
    kept.remove_suffix(1);
  return std::string(kept) + "…";
}

std::string xml_text(std::string_view text) {
  std::string safe;
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    const char c = text.front();
    if (length == 0) {
      safe += "\xef\xbf\xbd";  // the replacement character
    } else if (c == '&') {
      safe += "&amp;";
    } else if (c == '<') {
      safe += "&lt;";
    } else if (c == '>') {
      safe += "&gt;";
    } else if (c == '"') {
      safe += "&quot;";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      safe += ' ';
    } else {
      safe += text.substr(0, length);
    }
    text.remove_prefix(std::max<std::size_t>(length, 1));
  }
  return safe;
}

SvgWriter::SvgWriter(double width, double height, std::string_view background) {
  body_ = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:g} {1:g}\" width=\"{0:g}\" "
      "height=\"{1:g}\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica "
      "Neue', 'DejaVu Sans', Arial, sans-serif\">\n"
      "<rect width=\"{0:g}\" height=\"{1:g}\" rx=\"8\" fill=\"{2}\"/>\n",
      width, height, background);
}

void SvgWriter::line(Position from, Position to, const Stroke& stroke) {
  fmt::format_to(std::back_inserter(body_),
                 "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"{}\" "
                 "stroke-width=\"{:g}\"{}/>\n",
                 from.x, from.y, to.x, to.y, stroke.colour, stroke.width, dash_attribute(stroke));
}

void SvgWriter::polyline(std::span<const Position> path, const Stroke& stroke) {
  if (path.size() == 1) {
    dot(path.front(), 1.5 * stroke.width, stroke.colour);
    return;
  }
  body_ += "<polyline points=\"";
  for (std::size_t i = 0; i < path.size(); ++i)
    fmt::format_to(std::back_inserter(body_), "{}{:.1f},{:.1f}", i == 0 ? "" : " ", path[i].x,
                   path[i].y);
  fmt::format_to(std::back_inserter(body_),
                 "\" fill=\"none\" stroke=\"{}\" stroke-width=\"{:g}\" stroke-linejoin=\"round\" "
                 "stroke-linecap=\"round\"{}/>\n",
                 stroke.colour, stroke.width, dash_attribute(stroke));
}

void SvgWriter::dot(Position at, double radius, std::string_view colour) {
  fmt::format_to(std::back_inserter(body_),
                 "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:g}\" fill=\"{}\"/>\n", at.x, at.y,
                 radius, colour);
}

void SvgWriter::rectangle(const Box& box, std::string_view colour, double radius) {
  fmt::format_to(std::back_inserter(body_),
                 "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"", box.left,
                 box.top, box.right - box.left, box.bottom - box.top);
  if (radius > 0) fmt::format_to(std::back_inserter(body_), " rx=\"{:g}\"", radius);
  fmt::format_to(std::back_inserter(body_), " fill=\"{}\"/>\n", colour);
}

void SvgWriter::text(Position at, std::string_view text, const TextStyle& style) {
  write_text(at, text, style, {});
}

void SvgWriter::text_upwards(Position at, std::string_view text, const TextStyle& style) {
  write_text(at, text, style, fmt::format(" transform=\"rotate(-90 {:.1f} {:.1f})\"", at.x, at.y));
}

void SvgWriter::write_text(Position at, std::string_view text, const TextStyle& style,
                           std::string_view more) {
  if (text.empty()) return;
  constexpr std::string_view kAnchors[] = {"start", "middle", "end"};
  fmt::format_to(std::back_inserter(body_),
                 "<text x=\"{:.1f}\" y=\"{:.1f}\" font-size=\"{:g}\" fill=\"{}\" "
                 "text-anchor=\"{}\"{}{}>{}</text>\n",
                 at.x, at.y, style.size, style.colour,
                 kAnchors[static_cast<std::size_t>(style.anchor)],
                 style.weight == Weight::bold ? " font-weight=\"600\"" : "", more, xml_text(text));
}

namespace {

constexpr double kMostIntervals = 8;

// The smallest of 1, 2, 2.5 and 5 times a power of ten that cuts the range into at most
// kMostIntervals.
double round_spacing(double range) {
  const double least = range / kMostIntervals;
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Digits after the point that tell multiples of `spacing` apart.
int decimals(double spacing) {
  int digits = 0;
  for (; digits < 12; ++digits) {
    const double scaled = spacing * std::pow(10.0, digits);
    if (std::abs(scaled - std::round(scaled)) < 1e-6 * scaled) break;
  }
  return digits;
}

std::string label_of(double value, double spacing, double largest) {
  struct Unit {
    double size;
    const char* name;
  };
  if (largest >= 1e15 || spacing < 1e-6) return fmt::format("{:.4g}", value);
  for (const Unit& unit : {Unit{1e12, "T"}, Unit{1e9, "G"}, Unit{1e6, "M"}, Unit{1e3, "k"}}) {
    // Numbers below 10,000 are easy to read without a unit, and 0 needs none.
    if (largest < unit.size * (unit.size == 1e3 ? 10 : 1) || value == 0) continue;
    return fmt::format("{:.{}f}{}", value / unit.size, decimals(spacing / unit.size), unit.name);
  }
  return fmt::format("{:.{}f}", value, decimals(spacing));
}

}  // namespace

Axis::Axis(Scale scale, double lowest, double highest)
    : scale_(scale), lowest_(lowest), highest_(highest) {}

void Axis::add_round_ticks(double spacing) {
  const double largest = std::max(std::abs(lowest_), std::abs(highest_));
  // A count, not a sum of spacings, so that errors do not add up.
  const double slack = 1e-9 * (highest_ - lowest_);
  for (double i = std::ceil((lowest_ - slack) / spacing); i * spacing <= highest_ + slack; ++i) {
    const double value = i == 0 ? 0 : std::clamp(i * spacing, lowest_, highest_);
    ticks_.push_back({value, label_of(value, spacing, largest)});
  }
}

Axis Axis::steps(double lowest, double highest) {
  if (highest - lowest < 1) {
    lowest -= 1;
    highest += 1;
  }
  Axis axis(Scale::linear, lowest, highest);
  axis.add_round_ticks(std::max(1.0, round_spacing(highest - lowest)));
  return axis;
}

Axis Axis::linear(double lowest, double highest) {
  // A range of less than a millionth of the values would drown in rounding.
  const double size = std::max(std::abs(lowest), std::abs(highest));
  double air = std::max(0.06 * (highest - lowest), 1e-6 * size);
  if (highest == lowest) air = size > 0 ? 0.1 * size : 1.0;
  constexpr double kLargest = std::numeric_limits<double>::max() / 8;
  Axis axis(Scale::linear, std::max(lowest - air, -kLargest), std::min(highest + air, kLargest));
  // An axis of losses that come near 0 starts at 0.
  if (lowest >= 0 && axis.lowest_ < 0.15 * highest && highest > lowest) axis.lowest_ = 0;
  axis.add_round_ticks(round_spacing(axis.highest_ - axis.lowest_));
  return axis;
}

Axis Axis::logarithmic(double lowest, double highest) {
  const double air = std::max(0.06 * std::log(highest / lowest), 0.01);
  Axis axis(Scale::logarithmic, lowest * std::exp(-air), highest * std::exp(air));
  axis.add_power_ticks();
  return axis;
}

void Axis::add_power_ticks() {
  const double first = std::floor(std::log10(lowest_));
  const double last = std::ceil(std::log10(highest_));
  const double every = std::max(1.0, std::ceil((last - first) / kMostIntervals));
  for (double power = first; power <= last; ++power) {
    for (int factor = 1; factor < 10; ++factor) {
      const double value = factor * std::pow(10.0, power);
      if (value < lowest_ || value > highest_) continue;
      // On an axis of many powers of ten, lines between them would fill the picture.
      if (every > 1 && (factor != 1 || std::fmod(power - first, every) != 0)) continue;
      const bool labelled = factor == 1 || (last - first <= 4 && (factor == 2 || factor == 5));
      ticks_.push_back({value, labelled ? fmt::format("{:g}", value) : ""});
    }
  }
}

double Axis::position(double value) const {
  const double at = scale_ == Scale::linear
                        ? (value - lowest_) / (highest_ - lowest_)
                        : std::log(value / lowest_) / std::log(highest_ / lowest_);
  return std::clamp(at, 0.0, 1.0);
}

}  // namespace lockstep::observe
