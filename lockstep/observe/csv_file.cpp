#include <lockstep/observe/csv_file.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <system_error>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/log.h>
#include <lockstep/observe/csv_table.h>

namespace lockstep::observe {

namespace {

constexpr std::size_t kWriteBytes = 1 << 20;

// Adds the names that are new.
void unite(std::vector<std::string>& columns, const std::string& name) {
  if (std::ranges::find(columns, name) != columns.end()) return;
  if (name == "step" || !is_metric_name(name))
    throw UsageError("a metric cannot be called '{}': a name has letters, digits and _ - . / only, "
                     "at most 200 of them, and 'step' is taken",
                     name);
  if (columns.size() == kMostColumns)
    throw UsageError("metric '{}' would be column {} of a metrics file: use fewer names", name,
                     kMostColumns + 1);
  columns.push_back(name);
}

std::string header(const std::vector<std::string>& columns) {
  return fmt::format("step{}{}\n", columns.empty() ? "" : ",", fmt::join(columns, ","));
}

// Writes the file anew with the rows of `table` up to `last_step`, widened to `columns`, of which
// the table's are the first.
void rewrite(const std::filesystem::path& path, const CsvTable& table,
             const std::vector<std::string>& columns, std::int64_t last_step) {
  const std::string padding(columns.size() - table.columns().size(), ',');
  DurableFile file(path);
  std::string text = header(columns);
  for (const auto& row : table.rows()) {
    if (row.step > last_step) continue;
    text.append(row.line).append(padding).push_back('\n');
    if (text.size() < kWriteBytes) continue;
    file.write(text);
    text.clear();
  }
  file.write(text);
  file.commit();
}

std::vector<std::string> prepare(const std::filesystem::path& path,
                                 const CsvFile::Options& options) {
  std::vector<std::string> columns;
  std::error_code error;
  const bool resumes =
      options.resume_after && std::filesystem::file_size(path, error) > 0 && !error;
  if (!resumes) {
    for (const auto& name : options.columns) unite(columns, name);
    if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
    write_durably(path, header(columns));  // says so where there is still no folder
    return columns;
  }
  const CsvTable table(path);
  columns = table.columns();
  for (const auto& name : options.columns) unite(columns, name);
  if (table.num_unreadable() > 0)
    log::warn("metrics: {} lines of '{}' could not be read and are left out",
              table.num_unreadable(), path.string());
  rewrite(path, table, columns, *options.resume_after);
  return columns;
}

}  // namespace

CsvFile::CsvFile(const std::filesystem::path& path) : CsvFile(path, Options()) {}

CsvFile::CsvFile(const std::filesystem::path& path, const Options& options)
    : columns_(prepare(path, options)), file_(path, AppendedFile::Existing::append) {}

void CsvFile::record(std::int64_t step, std::span<const Metric> metrics) {
  std::exception_ptr failure;
  try {
    widen(metrics);
  } catch (const FileError&) {
    failure = std::current_exception();
  }
  std::string line = std::to_string(step);
  for (const auto& name : columns_) {
    line.push_back(',');
    // The last one given of a name counts.
    const auto given = std::find_if(metrics.rbegin(), metrics.rend(),
                                    [&](const Metric& metric) { return metric.name == name; });
    // fmt writes the fewest digits that read back as the same double.
    if (given != metrics.rend()) fmt::format_to(std::back_inserter(line), "{}", given->value);
  }
  line.push_back('\n');
  file_.append(line);
  if (failure) std::rethrow_exception(failure);
}

void CsvFile::widen(std::span<const Metric> metrics) {
  const auto known = [&](const Metric& metric) {
    return std::ranges::find(columns_, metric.name) != columns_.end();
  };
  if (std::ranges::all_of(metrics, known)) return;
  std::vector<std::string> columns = columns_;
  for (const auto& metric : metrics) unite(columns, metric.name);
  const auto path = file_.path();
  file_.append_kept();
  rewrite(path, CsvTable(path), columns, std::numeric_limits<std::int64_t>::max());
  file_.reopen();
  columns_ = std::move(columns);
}

}  // namespace lockstep::observe
