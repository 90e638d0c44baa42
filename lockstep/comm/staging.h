// Host copies of device tensors, for transports that reach host memory only. This is also how
// several ranks share one GPU.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace lockstep::comm {

// The streams on which the calls of one group copy, one for each device: results arrive in the
// order of the calls, so that whoever has waited for one has all before it, too. Thread-safe.
class StagingStreams {
 public:
  c10::Stream on(c10::Device device);

 private:
  std::mutex mutex_;
  std::vector<c10::Stream> streams_;
};

// Follows one call's tensors from the device to the host and back, beside the caller's stream. Made
// in the caller's thread, used in the one that runs the call.
class Staging {
 public:
  // Remembers the point in the current stream after which the tensors hold their values.
  explicit Staging(c10::Stream side);
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
