// Counts the memory of tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

namespace lockstep {

// Bytes of tensors that were made since this object was, on its thread and those that autograd
// starts for it, as LibTorch's allocators report them to profilers.
class LiveMemory {
 public:
  std::int64_t bytes() const { return counter_->live; }
  std::int64_t peak_bytes() const { return counter_->peak; }

 private:
#if TORCH_VERSION_MAJOR >= 2
  using Total = std::size_t;
#else
  using Total = std::int64_t;
#endif

  struct Counter : c10::MemoryReportingInfoBase {
    void reportMemoryUsage(void*, std::int64_t change, Total, Total, c10::Device) override {
      live += change;
      peak = std::max(peak, live);
    }
    bool memoryProfilingEnabled() const override { return true; }

    std::int64_t live = 0;
    std::int64_t peak = 0;
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counter_};
};

}  // namespace lockstep
