// SVG documents: the few shapes that a plot is made of, and the ticks of its axes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::observe {

struct Position {
  double x;
  double y;
};

struct Box {
  double left;
  double top;
  double right;
  double bottom;
};

struct Stroke {
  std::string_view colour;
  double width = 1;
  std::string_view dashes = {};
};

enum class Anchor : std::uint8_t { start, middle, end };
enum class Weight : std::uint8_t { normal, bold };

struct TextStyle {
  std::string_view colour;
  double size;
  Anchor anchor = Anchor::start;
  Weight weight = Weight::normal;
};

// Roughly how wide a text is: the reader's fonts decide.
double estimated_width(std::string_view text, double size);

// The text, with an ellipsis in place of its end where it is likely to be wider than `room`.
std::string shortened(std::string_view text, double size, double room);

// Any bytes as text of an XML document: markup is escaped, and bytes that are not UTF-8 or not
// allowed in XML are replaced.
std::string xml_text(std::string_view text);

// Writes a document, shape by shape, later ones on top. Threading: one thread. Failure: memory
// only.
class SvgWriter {
 public:
  SvgWriter(double width, double height, std::string_view background);

  void line(Position from, Position to, const Stroke& stroke);
  // One point is drawn as a dot.
  void polyline(std::span<const Position> path, const Stroke& stroke);
  void dot(Position at, double radius, std::string_view colour);
  // Filled, with round corners where there is a radius.
  void rectangle(const Box& box, std::string_view colour, double radius = 0);
  // Draws nothing for an empty text.
  void text(Position at, std::string_view text, const TextStyle& style);
  void text_upwards(Position at, std::string_view text, const TextStyle& style);

  std::string document() const { return body_ + "</svg>\n"; }

 private:
  void write_text(Position at, std::string_view text, const TextStyle& style,
                  std::string_view more);

  std::string body_;
};

struct Tick {
  double value;
  std::string label;  // empty where only a line of the grid is drawn
};

// A range of values, their ticks, and where a value is in it. The range is finite and has a length.
class Axis {
 public:
  enum class Scale : std::uint8_t { linear, logarithmic };

  // For steps: ticks are whole numbers.
  static Axis steps(double lowest, double highest);
  // A linear axis with some air around the values.
  static Axis linear(double lowest, double highest);
  // The same on a logarithmic scale. The values are positive.
  static Axis logarithmic(double lowest, double highest);

  // 0 at the lower end, 1 at the upper.
  double position(double value) const;
  Scale scale() const { return scale_; }
  const std::vector<Tick>& ticks() const { return ticks_; }

 private:
  Axis(Scale scale, double lowest, double highest);
  void add_round_ticks(double spacing);
  void add_power_ticks();

  Scale scale_;
  double lowest_;
  double highest_;
  std::vector<Tick> ticks_;
};

}  // namespace lockstep::observe
