// Random numbers that depend only on where they are used: on a seed, a name and an element's place
// in the logical tensor. They are the same however the tensor is cut, on every machine and with any
// number of threads.
#pragma once

#include <cstdint>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace lockstep::nn {

// The Philox key of all numbers drawn under a name, which is that of a parameter, or of a place in
// the model together with a step.
std::uint64_t stream_key(std::uint64_t seed, std::string_view name, std::uint64_t step = 0);

// Fills a tensor of any floating type with normally distributed numbers of mean 0 and standard
// deviation `std`: those of the logical tensor called `name`, in row-major order, from element
// `offset` on. Each is rounded to float first, then to the tensor's type.
void fill_normal(const at::Tensor& tensor, std::uint64_t seed, std::string_view name, double std,
                 std::int64_t offset = 0);

}  // namespace lockstep::nn
