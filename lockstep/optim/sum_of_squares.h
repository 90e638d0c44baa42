// Sums of squares over fixed blocks of a parameter: the pieces of a norm that comes out the same
// however the parameter is cut at block boundaries, on any number of threads, on CPU and CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/mesh/placement/placement.h>
#include <lockstep/optim/kernels/gradients.h>

namespace lockstep::optim {

// Blocks of kNormBlock elements in a tensor's row-major order; the last may be smaller.
std::int64_t num_norm_blocks(const at::Tensor& values);

// The sum of squares of each block of several tensors, as Doubles: the first tensor's, then the
// second's, … A shard that starts at a multiple of kNormBlock of its parameter has sums of the
// whole parameter. On their device, with nothing waiting for it, where all are on one CUDA device;
// otherwise on the CPU. Float, Double, Half and BFloat16; UsageError for other types.
at::Tensor sums_of_squares(std::span<const at::Tensor> tensors);

// One Double, on the values' device: the sum of sums over intervals of `values`, all added in the
// order in which they are given, to the bit as one thread adds.
at::Tensor add_in_order(const at::Tensor& values,
                        const std::vector<std::vector<mesh::Interval>>& sums);

}  // namespace lockstep::optim
