// The norm of gradients that are cut among ranks, to the bit what one rank with all of them has.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/placement/placement.h>

namespace lockstep::shard {

// A parameter's gradient, or what else is cut as the parameter is, as a rank sees it.
struct GradientPiece {
  at::Tensor values;                   // this rank's, flat
  std::vector<mesh::Interval> ranges;  // of every rank, in the parameter's own order
};

// The sum of squares, as one Double on `device`. As optim::gradient_norm adds: fixed blocks of each
// parameter, then parameters, in order. A block that lies on several ranks is summed by the one
// that has its begin, to whom the others send their elements. Every rank calls it, with pieces of
// the same parameters in the same order, and the same device: they exchange a few numbers there.
// Nothing waits for a GPU that the pieces are on, unless messages of GPUs go through the host.
at::Tensor gradient_sum_of_squares(const std::vector<GradientPiece>& pieces,
                                   comm::Communicator& group, c10::Device device = at::kCPU);

// The same for each of the pieces by itself, known to the host.
std::vector<double> sums_of_squares(const std::vector<GradientPiece>& pieces,
                                    comm::Communicator& group, c10::Device device = at::kCPU);

}  // namespace lockstep::shard
