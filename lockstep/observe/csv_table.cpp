#include <lockstep/observe/csv_table.h>

#include <algorithm>
#include <charconv>

#include <lockstep/base/error.h>

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

}  // namespace lockstep::observe
