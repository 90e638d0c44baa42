// The few shapes that a plot is made of, as SVG.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

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

// Roughly how wide a text is: the fonts are the reader's.
double estimated_width(std::string_view text, double size);

// The text, with an ellipsis in place of its end where it is likely to be wider than `room`.
std::string shortened(std::string_view text, double size, double room);

// Any bytes as text of an XML document: markup escaped, what is no UTF-8 or no character of XML
// replaced.
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
  // Nothing for an empty text.
  void text(Position at, std::string_view text, const TextStyle& style);
  void text_upwards(Position at, std::string_view text, const TextStyle& style);

  std::string document() const { return body_ + "</svg>\n"; }

 private:
  void write_text(Position at, std::string_view text, const TextStyle& style,
                  std::string_view more);

  std::string body_;
};

}  // namespace lockstep::observe
