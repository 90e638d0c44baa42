// The buffers of a module as they were at some time.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::activations {

// A module's forward may change its buffers, as batch norm does its running statistics. So that
// computing it a second time finds what the first time found, and leaves no trace, their values
// are copied before, and put back.
//
// Ownership: shares the buffers, owns the copies.
class BufferValues {
 public:
  BufferValues() = default;
  explicit BufferValues(const std::vector<at::Tensor>& buffers);

  // Keeps no copy of large buffers that are still the same, such as tables of constants. Small ones
  // are not looked at, as that would wait for a GPU.
  void drop_unchanged();

  // The values that the same buffers have now.
  BufferValues now() const;

  // Writes behind autograd's back, which has no reason to believe that anything was changed.
  void restore() const;

 private:
  struct Value {
    at::Tensor buffer;
    at::Tensor copy;
  };
  std::vector<Value> values_;
};

}  // namespace lockstep::activations
