// Metrics as a CSV file that any spreadsheet, pandas or gnuplot reads: written, and read back.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/file.h>
#include <lockstep/observe/metrics.h>

namespace lockstep::observe {

// A header "step,loss,…" and a row for each record(); cells of metrics that were not given are
// empty, numbers read back as the same double. A metric with a new name gets a column at the end:
// the file is then written anew, whole or not at all, so that it has as many cells in every row.
//
// A row is with the kernel when record() returns, and on disk when flush() does. A resumed run
// leaves the file as an uninterrupted run would: rows after the step it resumes from are removed,
// and so is a row that a kill tore. Rows that a full disk has no room for, up to a megabyte of
// them, are written when it has room again; they have no cells of a column that was added in
// between.
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

// The most columns that a file has beside "step".
inline constexpr std::size_t kMostColumns = 1000;

// Whether a metric may have this name: letters, digits and _ - . / only, so that no cell of a CSV
// file ever needs quotes, and TensorBoard shows the name as it is.
bool is_metric_name(std::string_view name);

// A metrics file on disk, which a resumed run and the drawing of curves read. A row that cannot be
// read is left out and counted.
//
// Ownership: keeps the file mapped. Threading: read-only. Failure: UsageError where the file is
// missing or does not begin like one that CsvFile wrote.
class CsvTable {
 public:
  struct Row {
    std::int64_t step;
    std::string_view line;  // without its newline; valid as long as the table
  };

  explicit CsvTable(const std::filesystem::path& path);

  const std::vector<std::string>& columns() const { return columns_; }  // without "step"
  const std::vector<Row>& rows() const { return rows_; }

  std::optional<std::size_t> column(std::string_view name) const;
  // A cell of a row; nothing where it is empty.
  static std::optional<double> value(const Row& row, std::size_t column);

  // Whole lines that are not rows. Text after the last newline is a torn row, and is not counted.
  std::size_t num_unreadable() const { return num_unreadable_; }
  bool torn() const { return torn_; }

 private:
  void read_header(std::string_view line);
  std::optional<Row> read_row(std::string_view line) const;

  MappedFile file_;
  std::vector<std::string> columns_;
  std::vector<Row> rows_;
  std::size_t num_unreadable_ = 0;
  bool torn_ = false;
};

}  // namespace lockstep::observe
