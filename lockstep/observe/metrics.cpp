#include <lockstep/observe/metrics.h>

#include <exception>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>

namespace lockstep::observe {

template <typename Action>
void Metrics::each(const Action& action) {
  std::erase_if(sinks_, [&](Output& output) {
    try {
      action(*output.sink);
      if (std::exchange(output.fails, false)) log::info("metrics are written again");
      return false;
    } catch (const FileError& error) {
      if (!std::exchange(output.fails, true))
        log::warn("metrics: {}; training goes on, and it is tried again", error.what());
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
