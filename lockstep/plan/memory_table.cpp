#include <lockstep/plan/memory_table.h>

#include <algorithm>
#include <functional>
#include <vector>

#include <spdlog/fmt/fmt.h>

namespace lockstep::plan {

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

// What all cells are in: a table is easier to read where numbers compare.
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
