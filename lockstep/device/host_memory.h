// Memory of the host that a device copies to and from while both go on with other work.
#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep::device {

// A flat tensor in the host's memory, as large as asked for and no larger (LibTorch's own pinned
// memory is rounded up to a power of two). Pinned where `device` is a GPU; otherwise any memory.
// UsageError, with the numbers, where the host has no more to pin.
at::Tensor host_memory(std::int64_t elements, at::ScalarType type, c10::Device device);

// A copy of a tensor in the host's memory that is begun when this is made. Nothing waits until
// somebody asks for it, and then for it alone: not for what the device was given later. Copies of
// this share it.
class HostCopy {
 public:
  HostCopy() = default;  // of nothing: nobody may ask for it
  explicit HostCopy(const at::Tensor& tensor);

  const at::Tensor& get() const;

 private:
  struct OnItsWay;

  std::shared_ptr<OnItsWay> copy_;
};

// Returns once the device has done all it was given by this thread so far.
void wait_for(c10::Device device);

}  // namespace lockstep::device
