#include <cli/layout_parts.h>

#include <spdlog/fmt/ranges.h>

namespace lockstep::cli {

std::string interval_text(const mesh::Interval& interval) {
  if (interval.size() == 1) return std::to_string(interval.begin);
  return fmt::format("{}–{}", interval.begin, interval.end - 1);
}

std::string intervals_text(const std::vector<mesh::Interval>& intervals) {
  std::vector<std::string> texts;
  for (const mesh::Interval& interval : intervals) texts.push_back(interval_text(interval));
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string layers_text(const train::RankLayout& rank, const models::ModelConfig& model) {
  std::vector<std::string> texts;
  for (const mesh::Interval& layers : rank.layers) {
    if (layers.begin == 0) texts.emplace_back("embedding");
    texts.push_back(
        fmt::format("layer{} {}", layers.size() == 1 ? "" : "s", interval_text(layers)));
    if (layers.end == model.num_layers) texts.emplace_back("head");
  }
  return fmt::format("{}", fmt::join(texts, ", "));
}

std::string samples_text(const train::RankLayout& rank, const DescribedRun& run) {
  const std::int64_t step = run.layout.data_ranks;
  const std::int64_t micro = run.resolved.batch.micro;
  const std::int64_t first = rank.data_rank;
  const std::int64_t last = first + (micro - 1) * step;
  if (micro == 1) return fmt::format("{}", first);
  if (step == 1) return interval_text({first, last + 1});
  if (micro == 2) return fmt::format("{}, {}", first, last);
  return fmt::format("{}, {}, … {}", first, first + step, last);
}

RankGrid grid_of(const train::RunLayout& layout) {
  RankGrid grid;
  const bool piped = layout.shape.axes().front().name == "pp";
  const int num_rows = piped ? layout.shape.axes().front().size : 1;
  for (const mesh::Axis& axis : layout.shape.axes())
    if (axis.size > 1 && axis.name != "pp") grid.column_axes.push_back(axis);
  const int num_columns = layout.shape.world_size() / num_rows;
  // The pipeline is the slowest axis: a row's ranks follow each other.
  for (int row = 0; row < num_rows; ++row) {
    grid.row_names.push_back(piped ? fmt::format("pp {}", row) : "");
    auto& ranks = grid.ranks.emplace_back();
    for (int column = 0; column < num_columns; ++column)
      ranks.push_back(row * num_columns + column);
  }
  grid.columns_per_share = num_columns / layout.data_ranks;
  return grid;
}

std::string axes_text(const train::RunLayout& layout) {
  std::vector<std::string> texts;
  for (const mesh::Axis& axis : layout.shape.axes())
    if (axis.size > 1) texts.push_back(fmt::format("{} {}", axis.name, axis.size));
  return fmt::format("{}", fmt::join(texts, " × "));
}

}  // namespace lockstep::cli
