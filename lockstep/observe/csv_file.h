// Metrics as a CSV file that any spreadsheet, pandas or gnuplot reads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/observe/appended_file.h>
#include <lockstep/observe/metrics.h>

namespace lockstep::observe {

// A header "step,loss,…" and a row for each record(); cells of metrics that were not given are
// empty, numbers read back as the same double. A metric with a new name gets a column at the end:
// the file is then written anew, whole or not at all, so that it has as many cells in every row.
//
// A row is with the kernel when record() returns, and on disk when flush() does. A resumed run
// leaves the file as an undisturbed one would have: rows after the step it resumes from go, and so
// does a row that a kill tore. Rows that a full disk has no room for come when it has some again,
// up to a megabyte of them; a column that was to be added meanwhile has no cells in them.
//
// Threading: one thread. Failure: FileError for the disk, UsageError for a name that cannot be a
// column's and, on resume, for a file that is not one of ours.
class CsvFile : public MetricSink {
 public:
  struct Options {
    // These come first, in this order, whether or not they are ever recorded.
    std::vector<std::string> columns = {"loss",          "validation_loss",   "learning_rate",
                                        "gradient_norm", "tokens_per_second", "seconds"};
    // Keeps the rows up to this step; without it, the file starts anew.
    std::optional<std::int64_t> resume_after;
  };

  // A default argument could not use the defaults of a class that is not complete yet.
  explicit CsvFile(const std::filesystem::path& path);
  CsvFile(const std::filesystem::path& path, const Options& options);

  void record(std::int64_t step, std::span<const Metric> metrics) override;
  void flush() override { file_.sync(); }
  std::size_t num_lost() const override { return file_.num_lost(); }

 private:
  void widen(std::span<const Metric> metrics);

  std::vector<std::string> columns_;
  AppendedFile file_;
};

}  // namespace lockstep::observe
