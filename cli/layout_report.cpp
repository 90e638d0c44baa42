#include <cli/layout_report.h>

#include <algorithm>
#include <functional>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/text.h>
#include <lockstep/mesh/placement/sequence_positions.h>
#include <lockstep/models/spec/family.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>
#include <lockstep/plan/text.h>

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

namespace {

using train::RankLayout;

struct Lines {
  std::string_view vertical, horizontal, cross, more;
};

Lines lines_of(observe::Characters characters) {
  if (characters == observe::Characters::ascii) return {"|", "-", "+", "..."};
  return {"│", "─", "┼", "…"};
}

std::string in_ascii(std::string text) {
  for (const auto& [character, instead] :
       {std::pair<std::string_view, std::string_view>("–", "-"), {"…", "..."}, {"×", "x"}})
    for (std::size_t at = 0; (at = text.find(character, at)) != std::string::npos;)
      text.replace(at, character.size(), instead);
  return text;
}

std::string repeated(std::string_view text, std::size_t times) {
  std::string result;
  for (std::size_t i = 0; i < times; ++i) result += text;
  return result;
}

// Columns that a text takes in a terminal, however many bytes its characters have.
std::size_t num_columns(const std::string& text) {
  return static_cast<std::size_t>(std::ranges::count_if(
      text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }));
}

std::string padded(const std::string& text, std::size_t columns) {
  const std::size_t width = num_columns(text);
  return width >= columns ? text : text + std::string(columns - width, ' ');
}

// The ranks of a row side by side, a bar before each that begins a share of the samples.
class GridText {
 public:
  GridText(const DescribedRun& run, const ReportStyle& style)
      : run_(run), grid_(grid_of(run.layout)), lines_(lines_of(style.characters)) {
    label_ = 5;
    for (const auto& name : grid_.row_names) label_ = std::max(label_, name.size());
    for (const mesh::Axis& axis : grid_.column_axes) label_ = std::max(label_, axis.name.size());
    cell_ = std::to_string(run.layout.shape.world_size() - 1).size() + 2;
    std::size_t notes = 0;
    for (const auto& row : grid_.ranks) notes = std::max(notes, note_of(row).size());
    columns_ = grid_.ranks.front().size();
    const auto share = static_cast<std::size_t>(grid_.columns_per_share);
    const auto width_of = [&](std::size_t columns) {
      return label_ + 1 + columns * cell_ + 2 * ((columns + share - 1) / share) + 4 + notes;
    };
    while (columns_ > share && width_of(columns_) > static_cast<std::size_t>(style.width))
      columns_ -= share;
  }

  std::string text() const {
    std::string result;
    for (const mesh::Axis& axis : grid_.column_axes)
      result += line(axis.name, [&](std::size_t column) {
        const int rank = grid_.ranks.front()[column];
        const int place = run_.layout.shape.coordinate(rank, axis.name);
        const bool begins = column == 0 || run_.layout.shape.coordinate(
                                               grid_.ranks.front()[column - 1], axis.name) != place;
        return begins ? std::to_string(place) : "";
      });
    if (!grid_.column_axes.empty()) result += rule();
    for (std::size_t row = 0; row < grid_.ranks.size(); ++row)
      result += line(
          grid_.row_names[row].empty() ? "ranks" : grid_.row_names[row],
          [&](std::size_t column) { return std::to_string(grid_.ranks[row][column]); },
          note_of(grid_.ranks[row]));
    return result;
  }

 private:
  bool begins_share(std::size_t column) const {
    return column % static_cast<std::size_t>(grid_.columns_per_share) == 0;
  }

  std::string line(const std::string& label, const std::function<std::string(std::size_t)>& cell,
                   const std::string& note = "") const {
    std::string result = padded(label, label_) + " ";
    for (std::size_t column = 0; column < columns_; ++column) {
      if (begins_share(column)) result += std::string(lines_.vertical) + " ";
      result += padded(cell(column), cell_);
    }
    if (columns_ < grid_.ranks.front().size()) result += std::string(lines_.more) + " ";
    result += note.empty() ? "" : " " + note;
    result.erase(result.find_last_not_of(' ') + 1);
    return result + "\n";
  }

  std::string rule() const {
    std::string result = repeated(lines_.horizontal, label_ + 1);
    for (std::size_t column = 0; column < columns_; ++column) {
      if (begins_share(column))
        result += std::string(lines_.cross) + std::string(lines_.horizontal);
      result += repeated(lines_.horizontal, cell_);
    }
    return result + "\n";
  }

  // All ranks of a row have the same layers.
  std::string note_of(const std::vector<int>& row) const {
    return layers_text(run_.layout.ranks[static_cast<std::size_t>(row.front())],
                       run_.resolved.model);
  }

  const DescribedRun& run_;
  RankGrid grid_;
  Lines lines_;
  std::size_t label_ = 0;    // columns of a line's name
  std::size_t cell_ = 0;     // columns of a rank
  std::size_t columns_ = 0;  // ranks of a line that are shown
};

std::string about_pipeline(const DescribedRun& run) {
  const pipeline::Schedule& schedule = run.resolved.pipeline->schedule;
  const double idle = pipeline::bubble(pipeline::simulate(schedule));
  std::string text = fmt::format("stages: {} of them by {}, {} micro-batch{} a step; with stages "
                                 "that take as long, ranks are idle for {:.1f} % of it",
                                 schedule.num_stages(), schedule.name, schedule.num_micro_batches,
                                 schedule.num_micro_batches == 1 ? "" : "es", 100 * idle);
  if (run.config.parallel.balance == train::StageBalance::time)
    text += "; layers are balanced by measured time when the run starts, and here by compute";
  return text;
}

std::string about_axis(const std::string& name, const DescribedRun& run) {
  const train::RunLayout& layout = run.layout;
  if (name == "pp") return about_pipeline(run);
  if (name == "cp")
    return fmt::format("parts of each sequence of {} tokens, by {}",
                       run.config.data.sequence_length,
                       mesh::name(run.config.parallel.context_algorithm));
  if (name == "tp")
    return fmt::format("parts of each layer{}; a rank sends {} along it in a step{}",
                       run.config.parallel.sequence_parallel ? ", with sequences between" : "",
                       plan::bytes_text(static_cast<double>(layout.tensor_bytes)),
                       run.config.precision.compute != train::Precision::fp32 &&
                               run.config.device == train::DeviceChoice::automatic
                           ? " on a GPU, and twice as much on a CPU, which computes in fp32"
                           : "");
  const std::string samples = "samples of their own";
  if (layout.shards == 1) return samples;
  // The optimizer's state alone is cut along all axes of the data.
  const bool shares =
      traits_of(layout.strategy).cut == ShardedState::optimizer || name == "dp_shard";
  if (!shares) return samples + "; copies of the model";
  return fmt::format("{}; {} in {} parts{}", samples, traits_of(layout.strategy).cut_text,
                     layout.shards,
                     layout.shards > layout.shape.size(name) ? ", with other axes" : "");
}

struct Column {
  std::string title;
  std::function<std::string(int, const RankLayout&)> text;
};

std::vector<Column> columns_of(const DescribedRun& run) {
  const train::RunLayout& layout = run.layout;
  const train::ParallelSection& parallel = run.config.parallel;
  std::vector<Column> columns = {
      {"rank", [](int rank, const auto&) { return std::to_string(rank); }}};
  if (layout.ranks.back().host > 0)
    columns.push_back({"host", [](int, const auto& one) { return std::to_string(one.host); }});
  for (std::size_t axis = 0; axis < layout.shape.axes().size(); ++axis)
    if (layout.shape.axes()[axis].size > 1)
      columns.push_back({layout.shape.axes()[axis].name, [axis](int, const auto& one) {
                           return std::to_string(one.coordinates[axis]);
                         }});
  columns.push_back(
      {"layers", [&](int, const auto& one) { return layers_text(one, run.resolved.model); }});
  if (parallel.tensor > 1) {
    columns.push_back({"heads", [](int, const auto& one) { return interval_text(one.heads); }});
    if (run.resolved.model.num_kv_heads != run.resolved.model.num_heads)
      columns.push_back(
          {"kv heads", [](int, const auto& one) { return interval_text(one.kv_heads); }});
    columns.push_back({"MLP", [](int, const auto& one) { return interval_text(one.inside); }});
    columns.push_back(
        {"vocabulary", [&](int, const auto& one) {
           const bool has_rows = std::ranges::any_of(one.layers, [&](const mesh::Interval& layers) {
             return layers.begin == 0 || layers.end == run.resolved.model.num_layers;
           });
           return has_rows ? interval_text(one.vocabulary) : "";
         }});
  }
  if (parallel.context > 1)
    columns.push_back(
        {"positions", [](int, const auto& one) { return intervals_text(one.positions); }});
  columns.push_back({"samples", [&](int, const auto& one) { return samples_text(one, run); }});
  if (layout.shards > 1)
    columns.push_back({"shard", [&](int, const auto& one) {
                         return fmt::format("{} of {}", one.shard_rank, layout.shards);
                       }});
  columns.push_back({"parameters", [&](int, const auto& one) {
                       const std::int64_t kept = cuts_parameters(layout.strategy)
                                                     ? one.num_parameters / layout.shards
                                                     : one.num_parameters;
                       return count_text(static_cast<double>(kept));
                     }});
  return columns;
}

std::string table_of(const DescribedRun& run) {
  const std::vector<Column> columns = columns_of(run);
  std::vector<std::vector<std::string>> rows(1);
  for (const Column& column : columns) rows[0].push_back(column.title);
  for (std::size_t rank = 0; rank < run.layout.ranks.size(); ++rank) {
    auto& row = rows.emplace_back();
    for (const Column& column : columns)
      row.push_back(column.text(static_cast<int>(rank), run.layout.ranks[rank]));
  }
  std::string text;
  std::vector<std::size_t> widths(columns.size());
  for (const auto& row : rows)
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], num_columns(row[i]));
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i) line += padded(row[i], widths[i] + 2);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace

std::string layout_report(const DescribedRun& run, const ReportStyle& style) {
  const train::RunLayout& layout = run.layout;
  const int num_hosts = layout.ranks.back().host + 1;
  const int num_ranks = layout.shape.world_size();
  std::string text = fmt::format(
      "{}, {} parameters, on {} rank{}{}{}{}\n\n",
      models::family_named(run.resolved.model.family).title,
      count_text(static_cast<double>(models::num_parameters(run.resolved.model))), num_ranks,
      num_ranks == 1 ? "" : "s", num_hosts > 1 ? fmt::format(" of {} hosts", num_hosts) : "",
      num_ranks > 1 ? ": " : "", axes_text(layout));
  text += GridText(run, style).text();
  if (num_ranks > 1) text += "\n";
  std::size_t width = 0;
  for (const mesh::Axis& axis : layout.shape.axes())
    if (axis.size > 1) width = std::max(width, axis.name.size());
  for (const mesh::Axis& axis : layout.shape.axes())
    if (axis.size > 1)
      text += fmt::format("{}  {:>3}  {}\n", padded(axis.name, width), axis.size,
                          about_axis(axis.name, run));
  const std::string uneven = train::batch_note(run.resolved.batch, layout.data_ranks, {},
                                               run.config.parallel.ranks_together());
  if (!uneven.empty())
    text += fmt::format("\nA{}.\n", uneven.substr(1));
  else
    text += fmt::format(
        "\nEach batch of {} sequences goes to {} rank{} or group{} of ranks, {} such "
        "batch{} a step.\n",
        run.resolved.batch.global / run.resolved.batch.accumulation, layout.data_ranks,
        layout.data_ranks == 1 ? "" : "s", layout.data_ranks == 1 ? "" : "s",
        run.resolved.batch.accumulation, run.resolved.batch.accumulation == 1 ? "" : "es");
  if (layout.tensor_crossing)
    text += fmt::format(
        "\nThe tensor axis reaches over hosts ({}): each layer then waits for the "
        "network twice forward and twice backward, {} of a rank in a step. {}.\n",
        to_text(*layout.tensor_crossing),
        plan::bytes_text(static_cast<double>(layout.tensor_bytes)),
        layout.tensor_crossing->inside > 1
            ? fmt::format("With tensor {} it stays inside", layout.tensor_crossing->inside)
            : "Give hosts a number of ranks that a tensor axis divides, or leave tensor at 1");
  text += "\n" + table_of(run);
  return style.characters == observe::Characters::ascii ? in_ascii(text) : text;
}

}  // namespace lockstep::cli
