// What ranks that should have been given the same were given instead.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep::data_parallel {

struct Difference {
  int rank = 0;           // the first that has other lines than rank 0
  std::size_t place = 0;  // of the first line that differs
  std::string on_first;   // that line; "nothing" where there is none
  std::string on_rank;
  std::size_t num_on_first = 0;  // lines
  std::size_t num_on_rank = 0;
};

// Every rank of the group calls it, with a line for each thing that should be the same, and gets
// the same answer: nothing where all lines are.
std::optional<Difference> first_difference(const std::vector<std::string>& lines,
                                           comm::Communicator& group);

// Every rank's lines, in rank order.
std::vector<std::vector<std::string>> gather_lines(const std::vector<std::string>& lines,
                                                   comm::Communicator& group);

// A number of each rank, on the host: [ranks].
at::Tensor gather_numbers(std::int64_t number, comm::Communicator& group);

}  // namespace lockstep::data_parallel
