// The element types that the CUDA kernels take.
#pragma once

#include <cstdint>

namespace lockstep::nn::cuda {

enum class Element : std::uint8_t { float32, float16, bfloat16 };

}  // namespace lockstep::nn::cuda
