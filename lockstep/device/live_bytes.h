// Counts the memory of tensors.
#pragma once

#include <cstdint>
#include <memory>

#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace lockstep::device {

// Bytes of one device's tensors that were made after this object and still exist, on its thread and
// the threads that autograd starts for it, as LibTorch's allocators report them to profilers.
// Memory of other threads, such as the ones that an operator starts, is not counted.
//
// While it lives, no LibTorch profiler counts memory on this thread. Threading: made and destroyed
// on one thread; any thread may read its numbers.
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
