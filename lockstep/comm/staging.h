// Host copies of device tensors, for transports that reach host memory only. This is also how
// several ranks share one GPU.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::comm {

// Follows one call's tensors from the device to the host and back, on a stream of its own. Made in
// the caller's thread, used in the one that runs the call.
class Staging {
 public:
  // Remembers the point in the current stream after which the tensors hold their values.
  explicit Staging(c10::Device device);
  ~Staging();

  // Waits for that point, and copies.
  at::Tensor to_host(const at::Tensor& tensor);
  // Room for a result, with the tensor's shape.
  at::Tensor host_like(const at::Tensor& tensor);
  // Enqueues the copy back, or one on the device; finish() follows the last one.
  void to_device(const at::Tensor& from, const at::Tensor& tensor);
  void finish();

  // After finish(): orders the current stream after the copies, or waits for them.
  void order_current_stream();
  bool arrived() const;

 private:
  void keep_for_side_stream(const at::Tensor& tensor);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep::comm
