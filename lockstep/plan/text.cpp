#include <lockstep/plan/text.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <functional>
#include <vector>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/error.h>

namespace lockstep::plan {

namespace {

constexpr double kMost = 0x1p62;

// Bytes of a unit such as "GiB", "gb" or "G"; 0 where it is no unit. A letter alone counts in
// 1024s, as in `docker run -m`.
double factor_of(std::string_view unit) {
  if (unit.empty() || unit == "B" || unit == "b") return 1;
  constexpr std::string_view kLetters = "kmgtp";
  const auto power = kLetters.find(static_cast<char>(std::tolower(unit.front())));
  if (power == kLetters.npos) return 0;
  std::string rest;
  for (const char letter : unit.substr(1))
    rest += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  if (rest != "" && rest != "b" && rest != "ib") return 0;
  const double base = rest == "b" ? 1000 : 1024;
  double factor = 1;
  for (std::size_t i = 0; i <= power; ++i) factor *= base;
  return factor;
}

}  // namespace

std::string bytes_text(double bytes) {
  constexpr double kKiB = 1 << 10;
  for (const auto& [unit, size] :
       {std::pair("TiB", kKiB * kKiB * kKiB * kKiB), std::pair("GiB", kKiB * kKiB * kKiB),
        std::pair("MiB", kKiB * kKiB), std::pair("KiB", kKiB)})
    if (bytes >= size) return fmt::format("{:.1f} {}", bytes / size, unit);
  return fmt::format("{:.0f} bytes", bytes);
}

std::int64_t parse_bytes(std::string_view text, std::string_view what) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit(end, static_cast<std::size_t>(text.data() + text.size() - end));
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  const double bytes = number * factor_of(unit);
  // A NaN is refused, too.
  if (error != std::errc() || !(bytes >= 1 && bytes < kMost))
    throw UsageError("{} is '{}': it must be an amount of memory, as 80GiB, 24GB or 512MiB", what,
                     text);
  return static_cast<std::int64_t>(bytes);
}

namespace {

struct Column {
  const char* heading;
  std::function<std::int64_t(const MemoryEstimate&)> bytes;
};

const std::vector<Column>& columns() {
  static const std::vector<Column> all = {
      {"weights", &MemoryEstimate::weights},
      {"gradients", &MemoryEstimate::gradients},
      {"optimizer", &MemoryEstimate::optimizer},
      {"in flight",
       [](const MemoryEstimate& one) { return one.gathered + one.gradients_on_their_way; }},
      {"activations", &MemoryEstimate::activations},
      {"step", &MemoryEstimate::step},
      {"buffers", &MemoryEstimate::buffers},
      {"copies", &MemoryEstimate::copies},
      {"peak", &MemoryEstimate::peak},
      {"on host", &MemoryEstimate::host},
  };
  return all;
}

// The unit of all cells: a table is easier to read where its numbers can be compared.
struct Unit {
  const char* name;
  double bytes;
};
Unit unit_for(std::span<const MemoryRow> rows) {
  std::int64_t largest = 0;
  for (const MemoryRow& row : rows) largest = std::max(largest, row.estimate.peak);
  constexpr double kMiB = 1 << 20;
  return static_cast<double>(largest) < 1024 * kMiB ? Unit{"MiB", kMiB} : Unit{"GiB", 1024 * kMiB};
}

bool is_worth_a_column(const Column& column, std::span<const MemoryRow> rows) {
  return std::ranges::any_of(rows, [&](const MemoryRow& row) {
    return static_cast<double>(column.bytes(row.estimate)) >
           0.002 * static_cast<double>(row.estimate.peak);
  });
}

}  // namespace

std::string memory_table(std::span<const MemoryRow> rows) {
  const Unit unit = unit_for(rows);
  std::vector<Column> shown;
  for (const Column& column : columns())
    if (is_worth_a_column(column, rows)) shown.push_back(column);
  const bool judged =
      std::ranges::any_of(rows, [](const MemoryRow& row) { return !row.verdict.empty(); });

  constexpr std::size_t kWidth = 7;
  const auto width = [&](const Column& column) {
    return std::max(kWidth, std::string_view(column.heading).size());
  };
  std::string text =
      fmt::format("{} on each rank\n{:>5}    {:<15}", unit.name, "ranks", "strategy");
  for (const Column& column : shown) text += fmt::format("  {:>{}}", column.heading, width(column));
  text += judged ? "  fits\n" : "\n";
  int before = 0;
  for (const MemoryRow& row : rows) {
    if (before != 0 && before != row.num_ranks) text += "\n";
    text += fmt::format("{:>5}  {} {:<15}",
                        before == row.num_ranks ? "" : std::to_string(row.num_ranks),
                        row.marked ? "*" : " ", name_of(row.strategy));
    before = row.num_ranks;
    for (const Column& column : shown)
      text +=
          fmt::format("  {:>{}.2f}", static_cast<double>(column.bytes(row.estimate)) / unit.bytes,
                      width(column));
    text += row.verdict.empty() ? "\n" : fmt::format("  {}\n", row.verdict);
  }
  return text;
}

}  // namespace lockstep::plan
