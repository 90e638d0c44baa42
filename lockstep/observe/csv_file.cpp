#include <lockstep/observe/csv_file.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <limits>
#include <system_error>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>

namespace lockstep::observe {

namespace {

// Takes the text up to `separator` off the front of `rest`; all of it where there is none.
std::string_view take_until(std::string_view& rest, char separator) {
  const auto end = rest.find(separator);
  const auto taken = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  return taken;
}

template <typename Number>
std::optional<Number> number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

bool is_metric_name(std::string_view name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.' || c == '/';
  };
  return !name.empty() && name.size() <= 200 && std::ranges::all_of(name, allowed);
}

CsvTable::CsvTable(const std::filesystem::path& path) : file_(path) {
  std::string_view rest(reinterpret_cast<const char*>(file_.bytes().data()), file_.size());
  bool header = true;
  while (!rest.empty()) {
    torn_ = rest.find('\n') == std::string_view::npos;
    std::string_view line = take_until(rest, '\n');
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (header) {
      read_header(line);
      header = false;
    } else if (!torn_) {
      const auto row = read_row(line);
      if (row) rows_.push_back(*row);
      num_unreadable_ += row ? 0 : 1;
    }
  }
}

void CsvTable::read_header(std::string_view line) {
  const auto refuse = [&](std::string_view why) {
    return UsageError("'{}' is not a metrics file of ours: {}; move it away, or name another file",
                      file_.path().string(), why);
  };
  if (take_until(line, ',') != "step") throw refuse("its first line does not begin with 'step'");
  while (!line.empty()) {
    const auto name = take_until(line, ',');
    if (!is_metric_name(name) || column(name) || columns_.size() == kMostColumns)
      throw refuse(
          fmt::format("its first line has no usable name for column {}", columns_.size() + 2));
    columns_.emplace_back(name);
  }
}

std::optional<CsvTable::Row> CsvTable::read_row(std::string_view line) const {
  std::string_view rest = line;
  const auto step = number<std::int64_t>(take_until(rest, ','));
  const auto num_cells = static_cast<std::size_t>(std::ranges::count(line, ','));
  if (!step || num_cells != columns_.size()) return std::nullopt;
  for (std::size_t i = 0; i < num_cells; ++i) {
    const auto cell = take_until(rest, ',');
    if (!cell.empty() && !number<double>(cell)) return std::nullopt;
  }
  return Row{*step, line};
}

std::optional<std::size_t> CsvTable::column(std::string_view name) const {
  const auto found = std::ranges::find(columns_, name);
  if (found == columns_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - columns_.begin());
}

std::optional<double> CsvTable::value(const Row& row, std::size_t column) {
  std::string_view rest = row.line;
  for (std::size_t i = 0; i <= column; ++i) take_until(rest, ',');
  return number<double>(take_until(rest, ','));
}

namespace {

constexpr std::size_t kWriteBytes = 1 << 20;

// Adds the name if it is new.
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

// Writes the file anew with the rows of `table` up to `last_step`. `columns` begins with the
// table's columns; the rows get empty cells for the others.
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
    write_durably(path, header(columns));  // throws where there is still no folder
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
    // If a name is given twice, its last value counts.
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
