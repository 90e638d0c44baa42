// Parameters for tests: the same numbers each time, on one thread or several.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/base/philox.h>
#include <lockstep/optim/parameters.h>

#include "../device/threads.h"

namespace lockstep::optim::testing {

// Numbers in [-1, 1), as a function of the key and the index.
inline at::Tensor numbers(at::IntArrayRef shape, std::uint64_t key,
                          at::ScalarType type = at::kFloat) {
  at::Tensor tensor = at::empty(shape, at::kFloat);
  float* values = tensor.data_ptr<float>();
  for (std::int64_t i = 0; i < tensor.numel(); ++i)
    values[i] = 2 * Philox::uniform(Philox::words(key, static_cast<std::uint64_t>(i))[0]) - 1;
  return tensor.to(type);
}

inline at::Tensor parameter(at::IntArrayRef shape, std::uint64_t key,
                            at::ScalarType type = at::kFloat) {
  return numbers(shape, key, type).set_requires_grad(true);
}

inline void set_gradient(const at::Tensor& parameter, const at::Tensor& gradient) {
  parameter.mutable_grad() = gradient;
}

inline NamedParameter with_gradient(const std::string& name, const at::Tensor& gradient) {
  const at::Tensor tensor = at::zeros(gradient.sizes(), gradient.options()).set_requires_grad(true);
  set_gradient(tensor, gradient);
  return {name, tensor};
}

// A copy of the values, without gradient or history.
inline at::Tensor snapshot(const at::Tensor& tensor) { return tensor.detach().clone(); }

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.detach(), b.detach());
}

}  // namespace lockstep::optim::testing
