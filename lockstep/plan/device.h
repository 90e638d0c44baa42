// Where a model computes, as far as memory goes.
#pragma once

#include <cstdint>

namespace lockstep::plan {

// Of fp32 on the CPU our own kernels compute, which save less for backward than LibTorch's; and
// gradients are summed over ranks where autograd put them, which on a GPU lie in buckets.
enum class Device : std::uint8_t { cpu, gpu };

}  // namespace lockstep::plan
