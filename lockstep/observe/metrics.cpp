#include <lockstep/observe/metrics.h>

#include <exception>
#include <utility>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>

namespace lockstep::observe {

template <typename Action>
void Metrics::each(const Action& action, Repeat warnings) {
  std::erase_if(sinks_, [&](Output& output) {
    try {
      action(*output.sink);
      if (!std::exchange(output.fails, false)) return false;
      const std::size_t lost = output.sink->num_lost();
      if (const auto more = lost - std::exchange(output.num_told_lost, lost); more > 0)
        log::warn("metrics are written again; {} records are lost, as too many waited", more);
      else
        log::info("metrics are written again");
      return false;
    } catch (const FileError& error) {
      if (!std::exchange(output.fails, true))
        log::warn("metrics: {}; training goes on, and it is tried again", error.what());
      else if (warnings == Repeat::yes)
        log::warn("metrics: {}; what waits is lost should the run end now", error.what());
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
  each([](MetricSink& sink) { sink.flush(); }, Repeat::yes);
}

}  // namespace lockstep::observe
