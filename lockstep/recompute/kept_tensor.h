// A saved tensor that is kept as it is.
#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::activations {

// A parameter, or a view of one: it takes no memory but its own, so there is nothing to gain from
// not keeping it.
bool is_parameter(const at::Tensor& tensor);

// Where there are hooks, autograd leaves it to them to find out that a tensor was changed in place.
class KeptTensor {
 public:
  KeptTensor() = default;
  // Without the tensor's node, which would keep itself alive where it saves its own result.
  explicit KeptTensor(const at::Tensor& tensor);

  bool defined() const { return tensor_.defined(); }
  bool changed() const { return tensor_._version() != version_; }

  // UsageError where it was changed since.
  const at::Tensor& checked() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
};

}  // namespace lockstep::activations
