// Pictures of a timeline, simulated or measured: micro-batches over time, a row for each rank.
#pragma once

#include <string>

#include <lockstep/observe/terminal.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

namespace lockstep::pipeline {

struct SvgText {
  std::string title = "Pipeline schedule";  // the bubble or idle share is written behind it
  std::string subtitle;                     // such as "4 ranks, 8 micro-batches"
  std::string time_unit;                    // such as "ms", for the axis
};

// A self-contained SVG document with its own background. Forward, backward and the gradients
// of weights have their colours, a rank's later stages lighter ones; each span has the number of
// its micro-batch where there is room. Where ranks have clocks of their own, it says so.
std::string draw_svg(const Timeline& timeline, const SvgText& text = {});

struct TextStyle {
  int width = 80;  // columns; no fewer than 40 are used
  observe::Characters characters = observe::Characters::unicode;
  observe::Colour colour = observe::Colour::none;
};

// A picture for a terminal. "F3" and "B3" begin the forward and the backward of micro-batch 3, I
// and W the backwards of the input and of the weights. Where actions are narrower than a column, a
// row shows how busy its rank is. A legend follows, which says if ranks have clocks of their own.
// Every line ends with a newline.
std::string draw_text(const Timeline& timeline, const TextStyle& style = {});

}  // namespace lockstep::pipeline
