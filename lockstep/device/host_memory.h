// Host memory that a device copies to and from while both go on with other work.
#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep::device {

// A flat tensor in the host's memory, no larger than asked for (LibTorch's own pinned memory is
// rounded up to a power of two). Pinned if `device` is a GPU; otherwise ordinary memory.
// UsageError, with the numbers, if the host has no more memory to pin.
at::Tensor host_memory(std::int64_t elements, at::ScalarType type, c10::Device device);

// A copy of a tensor in the host's memory, begun in the constructor. Nothing waits until the copy
// is asked for, and then only for the copy, not for work that the device got later. Copies of this
// object share it.
class HostCopy {
 public:
  HostCopy() = default;  // empty: must not be asked for a copy
  explicit HostCopy(const at::Tensor& tensor);

  const at::Tensor& get() const;

 private:
  struct OnItsWay;

  std::shared_ptr<OnItsWay> copy_;
};

// Numbers of the host's, as an Int or Long tensor on a device. The host does not wait for a GPU.
at::Tensor on_device(at::ArrayRef<std::int64_t> numbers, c10::ScalarType type, c10::Device device);

// Waits until the device has done all work that this thread has given it so far.
void wait_for(c10::Device device);

}  // namespace lockstep::device
