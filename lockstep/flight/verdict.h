// What a job hangs on, in a sentence or two for each finding.
#pragma once

#include <string>
#include <vector>

#include <lockstep/flight/diagnosis.h>

namespace lockstep::flight {

// The answer first, what else helps indented below it. Ends in a newline.
std::string verdict(const Standing& standing);

// "31.0 s", "12 min 5 s", "3 h 12 min".
std::string duration_text(double seconds);

}  // namespace lockstep::flight
