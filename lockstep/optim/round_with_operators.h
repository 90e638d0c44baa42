// Rounding to 16 bits by LibTorch's operators, for devices whose memory is not this process's.
#pragma once

#include <ATen/core/Tensor.h>

#include <lockstep/optim/kernels/low_precision.h>

namespace lockstep::optim {

// Writes Floats to as many Half or BFloat16 numbers, with the bits of narrow() in kernels/.
void round_with_operators(const at::Tensor& values, const at::Tensor& to, Rounding rounding,
                          const RandomBits& random);

}  // namespace lockstep::optim
