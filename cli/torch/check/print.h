// The report for people.
#pragma once

#include <string>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

enum class Style { plain, terminal };

// At most 80 columns wide (long names of hosts and files aside).
std::string to_text(const Report& report, Style style);

}  // namespace lockstep::cli::inspection
