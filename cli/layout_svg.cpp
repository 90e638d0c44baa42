#include <algorithm>

#include <spdlog/fmt/fmt.h>

#include <lockstep/base/text.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/observe/svg.h>

#include <cli/layout_report.h>

namespace lockstep::cli {

namespace {

using observe::Anchor;
using observe::SvgWriter;
using observe::Weight;

constexpr std::string_view kInk = "#1f2933";
constexpr std::string_view kSoftInk = "#5b6774";
constexpr double kMargin = 28;
constexpr double kTop = 96;
constexpr double kCellWidth = 168;
constexpr double kGap = 6;
constexpr double kShareGap = 22;
constexpr double kLineHeight = 17;
constexpr int kMostColumns = 32;

// One for each stage, light enough to be written on; they repeat.
constexpr std::string_view kStageColours[] = {"#dbe7fd", "#fde3d8", "#d5f0ec", "#fbeecb",
                                              "#e8dffa", "#dff2d8", "#fbdce9", "#e3e8ee"};

class LayoutDrawing {
 public:
  explicit LayoutDrawing(const DescribedRun& run)
      : run_(run),
        grid_(grid_of(run.layout)),
        share_(grid_.columns_per_share),
        columns_(shown_columns()),
        lines_(cell_lines(0).size()),
        header_(static_cast<double>(grid_.column_axes.size()) * kLineHeight + 8),
        left_(grid_.row_names.front().empty() ? kMargin : kMargin + 56),
        cell_height_(34 + static_cast<double>(lines_) * kLineHeight),
        svg_(std::max(x_of(columns_ - 1) + kCellWidth + kMargin, 520.0),
             y_of(grid_.ranks.size()) + kMargin, "#ffffff") {}

  std::string document() {
    title();
    for (int column = 0; column < columns_; ++column) head(column);
    for (std::size_t row = 0; row < grid_.ranks.size(); ++row) {
      if (!grid_.row_names[row].empty())
        svg_.text({kMargin, y_of(row) + cell_height_ / 2 + 5}, grid_.row_names[row],
                  {.colour = kInk, .size = 14, .weight = Weight::bold});
      for (int column = 0; column < columns_; ++column) cell(row, column);
    }
    return svg_.document();
  }

 private:
  // Whole shares of the samples: others are like them.
  int shown_columns() const {
    const int all = static_cast<int>(grid_.ranks.front().size());
    return std::min(all, std::max(share_, kMostColumns / share_ * share_));
  }

  double x_of(int column) const {
    const int gaps = column / share_;
    return left_ + column * (kCellWidth + kGap) + gaps * (kShareGap - kGap);
  }
  double y_of(std::size_t row) const {
    return kTop + header_ + static_cast<double>(row) * (cell_height_ + kGap);
  }

  void title() {
    const train::RunLayout& layout = run_.layout;
    svg_.text(
        {kMargin, 40},
        fmt::format("{}, {} parameters on {} ranks",
                    models::family_named(run_.resolved.model.family).title,
                    count_text(static_cast<double>(models::num_parameters(run_.resolved.model))),
                    layout.shape.world_size()),
        {.colour = kInk, .size = 19, .weight = Weight::bold});
    const int left_out = static_cast<int>(grid_.ranks.front().size()) - columns_;
    svg_.text(
        {kMargin, 64},
        axes_text(layout) +
            (left_out > 0 ? fmt::format("; {} more ranks in each row have other samples", left_out)
                          : ""),
        {.colour = kSoftInk, .size = 13});
  }

  void head(int column) {
    double y = kTop;
    for (const mesh::Axis& axis : grid_.column_axes) {
      const int place = run_.layout.shape.coordinate(rank_at(0, column), axis.name);
      const bool begins =
          column == 0 || run_.layout.shape.coordinate(rank_at(0, column - 1), axis.name) != place;
      if (begins)
        svg_.text({x_of(column) + 2, y}, fmt::format("{} {}", axis.name, place),
                  {.colour = kSoftInk, .size = 13});
      y += kLineHeight;
    }
  }

  int rank_at(std::size_t row, int column) const {
    return grid_.ranks[row][static_cast<std::size_t>(column)];
  }

  std::vector<std::string> cell_lines(int rank) const {
    const train::RankLayout& one = run_.layout.ranks[static_cast<std::size_t>(rank)];
    std::vector<std::string> lines = {layers_text(one, run_.resolved.model)};
    if (run_.config.parallel.tensor > 1)
      lines.push_back(fmt::format("heads {}", interval_text(one.heads)));
    if (run_.config.parallel.context > 1)
      lines.push_back(fmt::format("positions {}", intervals_text(one.positions)));
    lines.push_back(fmt::format("samples {}", samples_text(one, run_)));
    if (run_.layout.shards > 1)
      lines.push_back(fmt::format("shard {} of {}", one.shard_rank, run_.layout.shards));
    return lines;
  }

  void cell(std::size_t row, int column) {
    const int rank = rank_at(row, column);
    const train::RankLayout& one = run_.layout.ranks[static_cast<std::size_t>(rank)];
    const double x = x_of(column);
    const double y = y_of(row);
    svg_.rectangle({x, y, x + kCellWidth, y + cell_height_},
                   kStageColours[row % std::size(kStageColours)], 6);
    svg_.text({x + 12, y + 23}, fmt::format("rank {}", rank),
              {.colour = kInk, .size = 14, .weight = Weight::bold});
    if (run_.layout.ranks.back().host > 0)
      svg_.text({x + kCellWidth - 12, y + 23}, fmt::format("host {}", one.host),
                {.colour = kSoftInk, .size = 12, .anchor = Anchor::end});
    double line_y = y + 23 + kLineHeight;
    for (const std::string& line : cell_lines(rank)) {
      svg_.text({x + 12, line_y}, observe::shortened(line, 12, kCellWidth - 20),
                {.colour = kInk, .size = 12});
      line_y += kLineHeight;
    }
  }

  const DescribedRun& run_;
  RankGrid grid_;
  int share_;
  int columns_;
  std::size_t lines_;
  double header_;
  double left_;
  double cell_height_;
  SvgWriter svg_;
};

}  // namespace

std::string layout_svg(const DescribedRun& run) { return LayoutDrawing(run).document(); }

}  // namespace lockstep::cli
