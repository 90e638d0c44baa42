// Numbers of a training run, on their way to files.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lockstep::observe {

struct Metric {
  std::string name;  // "loss", "validation_loss"
  double value;      // NaN and infinity are values like others
};

// Where metrics go. Implementations throw FileError where the machine does not take them, after
// which they can be called again, and UsageError for a metric they cannot hold.
class MetricSink {
 public:
  virtual ~MetricSink() = default;
  virtual void record(std::int64_t step, std::span<const Metric> metrics) = 0;
  // What was recorded is on disk when this returns.
  virtual void flush() = 0;
  // Records that will never come, as too many others wait for the machine to take them.
  virtual std::size_t num_lost() const { return 0; }
};

// Hands metrics to every sink. A full disk costs at most metrics, never the training run: a sink
// with a FileError is tried again with the next metrics, with one warning until it works again, one
// at each flush() in vain, and one that says how many records were lost, if any. One that fails
// otherwise is dropped, with a warning. Ownership: owns its sinks. Threading: one
// thread. Failure: never throws but for memory.
class Metrics {
 public:
  void add(std::unique_ptr<MetricSink> sink) { sinks_.push_back({.sink = std::move(sink)}); }
  void record(std::int64_t step, std::span<const Metric> metrics);
  void record(std::int64_t step, std::initializer_list<Metric> metrics) {
    record(step, std::span(metrics.begin(), metrics.size()));
  }
  void flush();

  std::size_t num_sinks() const { return sinks_.size(); }

 private:
  struct Output {
    std::unique_ptr<MetricSink> sink;
    bool fails = false;
    std::size_t num_told_lost = 0;
  };
  enum class Repeat { no, yes };

  template <typename Action>
  void each(const Action& action, Repeat warnings = Repeat::no);

  std::vector<Output> sinks_;
};

}  // namespace lockstep::observe
