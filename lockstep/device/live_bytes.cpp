#include <lockstep/device/live_bytes.h>

#include <algorithm>
#include <mutex>

#include <c10/core/Allocator.h>
#include <torch/version.h>

namespace lockstep::device {

class LiveBytes::Counter final : public c10::MemoryReportingInfoBase {
 public:
#if TORCH_VERSION_MAJOR >= 2
  using Total = std::size_t;
#else
  using Total = std::int64_t;
#endif

  explicit Counter(c10::Device device) : device_(device) {}

  void reportMemoryUsage(void*, std::int64_t change, Total, Total, c10::Device device) override {
    if (device.type() != device_.type()) return;
    const std::lock_guard lock(mutex);
    now += change;
    peak = std::max(peak, now);
  }
  bool memoryProfilingEnabled() const override { return true; }

  mutable std::mutex mutex;
  std::int64_t now = 0;
  std::int64_t peak = 0;

 private:
  c10::Device device_;
};

LiveBytes::LiveBytes(c10::Device device)
    : counter_(std::make_shared<Counter>(device)),
      guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

LiveBytes::~LiveBytes() = default;

std::int64_t LiveBytes::now() const {
  const std::lock_guard lock(counter_->mutex);
  return counter_->now;
}

std::int64_t LiveBytes::peak() const {
  const std::lock_guard lock(counter_->mutex);
  return counter_->peak;
}

void LiveBytes::reset_peak() {
  const std::lock_guard lock(counter_->mutex);
  counter_->peak = counter_->now;
}

}  // namespace lockstep::device
