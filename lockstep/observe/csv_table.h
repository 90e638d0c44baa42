// A metrics.csv as it is found on disk: by a run that resumes, and by whoever draws it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/base/file.h>

namespace lockstep::observe {

// The columns of one file: "step", then these.
inline constexpr std::size_t kMostColumns = 1000;

// Whether a metric may be called so: letters, digits and _ - . / only, so that no cell of a CSV
// file ever needs quotes, and TensorBoard shows the name as it is.
bool is_metric_name(std::string_view name);

// Ownership: keeps the file mapped. Threading: read-only. Failure: UsageError where the file is
// missing or does not begin as one of ours. A row that is torn or cannot be read is left out and
// counted.
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

  // Whole lines that are no rows. Whatever follows the last newline is a torn row, and not counted.
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
