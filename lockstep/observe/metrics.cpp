#include <lockstep/observe/metrics.h>

#include <exception>

#include <lockstep/base/log.h>

namespace lockstep::observe {

template <typename Action>
void Metrics::each(const Action& action) {
  std::erase_if(sinks_, [&](const std::unique_ptr<MetricSink>& sink) {
    try {
      action(*sink);
      return false;
    } catch (const std::exception& error) {
      log::warn("metrics: {}; training goes on without this output", error.what());
      return true;
    }
  });
}

void Metrics::record(std::int64_t step, std::span<const Metric> metrics) {
  each([&](MetricSink& sink) { sink.record(step, metrics); });
}

void Metrics::flush() {
  each([](MetricSink& sink) { sink.flush(); });
}

}  // namespace lockstep::observe
