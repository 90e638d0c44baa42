// Launches this test program as the ranks of a job.
#pragma once

#include <string>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::ranks {

// Runs `lockstep run` of this program with these arguments, and fails the test with what the ranks
// said where a cell failed or a rank did not come to its end.
void expect_cells_pass(int num_ranks, const std::vector<std::string>& arguments,
                       milliseconds longest = milliseconds(200'000));

}  // namespace lockstep::ranks
