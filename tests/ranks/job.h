// Launches this test program as the ranks of a job.
#pragma once

#include <string>
#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::ranks {

// Runs `lockstep run` of this program with these arguments. If a cell fails or a rank does not
// finish, the test fails with the ranks' output.
void expect_cells_pass(int num_ranks, const std::vector<std::string>& arguments,
                       milliseconds longest = milliseconds(200'000));

}  // namespace lockstep::ranks
