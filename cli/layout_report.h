// `lockstep train --describe`: who holds what, in words, as a table and as pictures.
#pragma once

#include <string>

#include <lockstep/observe/terminal.h>

#include <cli/layout_parts.h>

namespace lockstep::cli {

struct ReportStyle {
  int width = 80;  // columns
  observe::Characters characters = observe::Characters::unicode;
};

// The mesh as a grid of ranks, what its axes are for, and a row for each rank.
std::string layout_report(const DescribedRun& run, const ReportStyle& style = {});

// The grid alone, with what each rank holds in its cell: a self-contained SVG document. Of many
// ranks, the first so many samples' are drawn, and the rest said.
std::string layout_svg(const DescribedRun& run);

}  // namespace lockstep::cli
