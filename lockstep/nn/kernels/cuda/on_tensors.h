// Connects the CUDA kernels to LibTorch's tensors. Only our .cpp files include this, in builds
// whose LibTorch has CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <lockstep/base/error.h>
#include <lockstep/nn/kernels/cuda/kernels.h>

namespace lockstep::nn::cuda {

// Whether the kernels can work on this tensor.
inline bool takes(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return tensor.is_cuda() && (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
}

inline Element element_of(at::ScalarType type) {
  if (type == at::kHalf) return Element::float16;
  if (type == at::kBFloat16) return Element::bfloat16;
  LOCKSTEP_CHECK(type == at::kFloat);
  return Element::float32;
}

// Returns the tensor with its elements one after the other, beginning at a multiple of 16 bytes, as
// LibTorch's allocators place them; a view may begin anywhere and is then copied.
inline at::Tensor dense(const at::Tensor& tensor) {
  at::Tensor packed = tensor.contiguous();
  return reinterpret_cast<std::uintptr_t>(packed.data_ptr()) % 16 == 0 ? packed : packed.clone();
}

// Calls launch(stream) with the tensor's device as the current one. Throws CUDA's error if a kernel
// could not be started.
template <typename Launch>
void launch_on(const at::Tensor& tensor, const Launch& launch) {
  const c10::cuda::CUDAGuard on_device(tensor.device());
  launch(c10::cuda::getCurrentCUDAStream().stream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace lockstep::nn::cuda
