// Ranks agree before and while they train together: that they hold the same tensors, what differs
// where they do not, and the order in which they exchange gradients.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/tensors.h>

namespace lockstep::data_parallel {

// Every rank of the group calls it. Where names, shapes, dtypes or what is trained differ, every
// rank gets the same UsageError, which names the first tensor that differs and the ranks.
void check_same_tensors(std::span<const NamedTensor> tensors, comm::Communicator& group);

// Every rank's tensors become those of rank 0. Those that lie elsewhere than on `device`, where the
// group's messages live, go through a copy there; without one, each goes from where it lies, which
// must be a device that the group takes.
void broadcast_from_first(std::span<const NamedTensor> tensors, comm::Communicator& group,
                          std::optional<c10::Device> device = {});

// Every rank says what is wrong on it, nothing where all is well. Where something is on any, every
// rank gets the same UsageError, with the first fault there is.
void refuse_together(const std::string& fault, comm::Communicator& group);

// The first line in which a rank differs from rank 0, where all should have been given the same.
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

// The order of the lowest rank that has one; every rank gives as many numbers, and says whether its
// order counts: a rank without samples has none to teach. None where no rank has. Every rank of the
// group calls it.
std::optional<std::vector<std::size_t>> agree_on_order(const std::vector<std::size_t>& mine,
                                                       bool counts, comm::Communicator& group);

// The fault of a list of tensors that should hold a certain state, for the middle of a sentence: a
// name that is missing, not wanted or there twice, or a tensor of another shape. Empty where the
// list is the whole state, in any order.
std::string state_fault(const std::vector<NamedTensor>& wanted,
                        const std::vector<NamedTensor>& given);

// By name, for lists without a fault.
std::map<std::string, at::Tensor> by_name(const std::vector<NamedTensor>& state);

}  // namespace lockstep::data_parallel
