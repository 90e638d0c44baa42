// Numbers of a training run, and the sinks that write them to files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::observe {

struct Metric {
  std::string name;  // "loss", "validation_loss"
  double value;      // NaN and infinity are values like others
};

// A destination of metrics. It throws FileError when the disk cannot take them, and can be called
// again afterwards; UsageError for a metric that it cannot hold.
class MetricSink {
 public:
  virtual ~MetricSink() = default;
  virtual void record(std::int64_t step, std::span<const Metric> metrics) = 0;
  // All recorded metrics are on disk when this returns.
  virtual void flush() = 0;
  // Records that were dropped because too many others were waiting for the disk.
  virtual std::size_t num_lost() const { return 0; }
};

// Hands metrics to every sink. A full disk costs at most metrics, never the training run: a sink
// with a FileError is tried again with the next metrics, with one warning until it works again, one
// at each flush() that fails, and one that says how many records were lost, if any. A sink that
// throws anything else is removed, with a warning.
//
// Ownership: owns its sinks. Threading: one thread. Failure: throws only for lack of memory.
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

// A file that grows by whole records, each in one write: a kill cuts off at most the last one. When
// the disk is full, a record leaves the file as it was; it is kept, with up to a megabyte of
// others, until a later call has room for them.
//
// Ownership: closes the file when destroyed. Threading: one thread. Failure: FileError naming the
// file and the system's reason.
class AppendedFile {
 public:
  enum class Existing { append, refuse };

  // With Existing::refuse, a file that exists is not opened: refused() then says so.
  AppendedFile(std::filesystem::path path, Existing existing);
  ~AppendedFile();
  AppendedFile(AppendedFile&& other) noexcept;
  AppendedFile& operator=(AppendedFile&& other) = delete;

  bool refused() const { return fd_ < 0; }
  void append(std::string_view record);
  // Writes the records that are kept, if any.
  void append_kept();
  // Opens the path again, after another file was moved there.
  void reopen();
  void sync();

  const std::filesystem::path& path() const { return path_; }
  // Records that were dropped because a megabyte of others was waiting.
  std::size_t num_lost() const { return num_lost_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::string kept_;
  std::size_t num_lost_ = 0;
};

}  // namespace lockstep::observe
