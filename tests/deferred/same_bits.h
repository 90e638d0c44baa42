// Compares tensors to the bit, and generators.
#pragma once

#include <cstring>
#include <mutex>
#include <string>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace lockstep::deferred::testing {

// The bytes of the elements in row-major order.
inline std::string bytes_of(const at::Tensor& tensor) {
  const at::Tensor copy = tensor.detach().clone(at::MemoryFormat::Contiguous);
  return {static_cast<const char*>(copy.data_ptr()), copy.nbytes()};
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.scalar_type() == b.scalar_type() && a.requires_grad() == b.requires_grad() &&
         bytes_of(a) == bytes_of(b);
}

inline std::string generator_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return bytes_of(generator.get_state());
}

inline std::string generator_state() {
  return generator_state(at::detail::getDefaultCPUGenerator());
}

}  // namespace lockstep::deferred::testing
