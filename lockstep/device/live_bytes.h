// Counts the memory of tensors.
#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace lockstep::device {

// Bytes of one device's tensors that were made since this object was and are still there: on its
// thread and those that autograd starts for it, as LibTorch's allocators report them to profilers.
// Memory of other threads, such as the ones that an operator starts, is not counted.
//
// While it lives, no profiler of LibTorch's counts memory on this thread. Threading: made and
// destroyed on one thread; its numbers may be asked for on any.
class LiveBytes {
 public:
  explicit LiveBytes(c10::Device device);
  ~LiveBytes();
  LiveBytes(const LiveBytes&) = delete;
  LiveBytes& operator=(const LiveBytes&) = delete;

  std::int64_t now() const;
  // The most since this was made, or since the last reset_peak().
  std::int64_t peak() const;
  void reset_peak();

 private:
  class Counter;

  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace lockstep::device
