// An order that all ranks follow, taught by one of them.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep::data_parallel {

// The order of the lowest rank that has one; every rank gives as many numbers, and says whether its
// order counts: a rank without samples has none to teach. None where no rank has. Every rank of the
// group calls it.
std::optional<std::vector<std::size_t>> agree_on_order(const std::vector<std::size_t>& mine,
                                                       bool counts, comm::Communicator& group);

}  // namespace lockstep::data_parallel
