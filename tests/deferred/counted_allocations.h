// Counts what LibTorch allocates for tensors of the CPU on this thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/version.h>

namespace lockstep::deferred::testing {

class CountedAllocations {
 public:
  // Those since this was made and not freed yet; frees of what is older are left out.
  std::int64_t peak_bytes() const { return counter_->peak_bytes; }

 private:
#if TORCH_VERSION_MAJOR >= 2
  using Total = std::size_t;
#else
  using Total = std::int64_t;
#endif
  class Counter final : public c10::MemoryReportingInfoBase {
   public:
    void reportMemoryUsage(void*, std::int64_t change, Total, Total, c10::Device) override {
      bytes += change;
      peak_bytes = std::max(peak_bytes, bytes);
    }
    bool memoryProfilingEnabled() const override { return true; }

    std::int64_t bytes = 0;
    std::int64_t peak_bytes = 0;
  };

  std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, counter_};
};

}  // namespace lockstep::deferred::testing
