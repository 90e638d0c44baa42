// What is wrong with a machine or a set of ranks, and what to do about it.
#pragma once

#include <vector>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

// Judges what is in the report; those that prevent training come first.
std::vector<Problem> find_problems(const Report& report);

}  // namespace lockstep::cli::inspection
