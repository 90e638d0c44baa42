// Sums of squares over fixed blocks of a parameter: the pieces of a norm that comes out the same
// however the parameter is cut at block boundaries, on any number of threads, on CPU and CUDA.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/optim/kernels/sum_of_squares.h>

namespace lockstep::optim {

// Blocks of kNormBlock elements in a tensor's row-major order; the last may be smaller.
std::int64_t num_norm_blocks(const at::Tensor& values);

// For each of some blocks of `values` the sum of squares, in double. A shard that starts at a
// multiple of kNormBlock of its parameter has sums of the whole parameter. Float, Double, Half and
// BFloat16; UsageError for other types, and for blocks that `values` does not have.
std::vector<double> sum_of_squares_of_blocks(const at::Tensor& values, std::int64_t first_block,
                                             std::int64_t num_blocks);

// Of all blocks of several tensors: the first tensor's, then the second's, … With CUDA tensors one
// wait for each device, whatever the number of tensors.
std::vector<double> sum_of_squares_of_blocks(std::span<const at::Tensor> tensors);

}  // namespace lockstep::optim
