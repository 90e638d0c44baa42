// Cuts a sequence whose positions the ranks of a context-parallel group share.
#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/sequence_positions.h>

namespace lockstep::nn {

using mesh::ContextAlgorithm;
using mesh::length_multiple;
using mesh::local_length;
using mesh::positions;
using mesh::SequencePart;
using mesh::SplitKind;
namespace internal {
using mesh::internal::BlockSight;
using mesh::internal::sight_of;
}  // namespace internal

// Returns this rank's part of a whole tensor along `dim`, as a copy or a view; differentiable.
// UsageError as in local_length().
at::Tensor take_part(const at::Tensor& whole, std::int64_t dim, const SequencePart& part);

// The inverse: joins the parts of all ranks, in their order. UsageError if their lengths differ, or
// cannot be those of such a split.
at::Tensor join_parts(const std::vector<at::Tensor>& parts, std::int64_t dim, SplitKind kind);

}  // namespace lockstep::nn
