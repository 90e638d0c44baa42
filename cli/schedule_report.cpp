#include <cli/schedule_report.h>

#include <algorithm>
#include <optional>
#include <vector>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::cli {

namespace {

using pipeline::Schedule;
using pipeline::Timeline;

std::vector<int> stages_of(const Schedule& schedule, int rank) {
  std::vector<int> stages;
  for (int stage = 0; stage < schedule.num_stages(); ++stage)
    if (schedule.rank_of_stage[static_cast<std::size_t>(stage)] == rank) stages.push_back(stage);
  return stages;
}

double idle_time(const Timeline& timeline, std::size_t rank) {
  double idle = timeline.makespan();
  for (const pipeline::Span& span : timeline.ranks[rank]) idle -= span.end - span.start;
  return idle;
}

// Where it is less than that of a step for all ranks.
std::optional<double> bubble_on_its_own(const Timeline& timeline) {
  const double own = pipeline::bubble_between_own_ends(timeline);
  if (own >= pipeline::bubble(timeline) - 5e-4) return std::nullopt;
  // Not "-0.0".
  return std::max(own, 0.0);
}

// A forward through one of several stages holds so much less.
std::string live_text(const pipeline::LiveForwards& live, std::size_t num_stages) {
  std::string text = num_stages == 1
                         ? fmt::format("{}", live.until_weight)
                         : fmt::format("{:.4g} ({} through one of {} stages)",
                                       live.until_weight / static_cast<double>(num_stages),
                                       live.until_weight, num_stages);
  if (live.until_input != live.until_weight)
    text += fmt::format(", {} of them before their input's backward", live.until_input);
  return text;
}

}  // namespace

std::string about_schedule(const Schedule& schedule) {
  const int ranks = schedule.num_ranks();
  const int stages = schedule.num_stages();
  std::string text = fmt::format("{} rank{}", ranks, ranks == 1 ? "" : "s");
  if (stages != ranks)
    text += stages % ranks == 0 ? fmt::format(" with {} stages each", stages / ranks)
                                : fmt::format(", {} stages", stages);
  return text + ", " +
         fmt::format("{} micro-batch{}", schedule.num_micro_batches,
                     schedule.num_micro_batches == 1 ? "" : "es");
}

std::string about_drawing(const Schedule& schedule, const Timeline& timeline) {
  const auto own = bubble_on_its_own(timeline);
  return about_schedule(schedule) +
         (own ? fmt::format("; {:.1f} % between a rank's first action and its last", 100 * *own)
              : "");
}

std::string schedule_table(const Schedule& schedule, const Timeline& timeline) {
  const double makespan = timeline.makespan();
  std::string text = fmt::format("bubble {:.1f} % of a step that takes {:.6g}\n",
                                 100 * pipeline::bubble(timeline), makespan);
  if (const auto own = bubble_on_its_own(timeline))
    text += fmt::format("       {:.1f} % where ranks start the next step without waiting for each "
                        "other\n",
                        100 * *own);
  std::vector<std::string> stage_texts;
  std::size_t width = 6;
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    stage_texts.push_back(fmt::format("{}", fmt::join(stages_of(schedule, rank), ", ")));
    width = std::max(width, stage_texts.back().size());
  }
  text += fmt::format("\nrank  {:<{}}    idle  micro-batches live at most\n", "stages", width);
  const auto live = pipeline::live_forwards(schedule);
  for (std::size_t rank = 0; rank < live.size(); ++rank) {
    const double idle = makespan > 0 ? 100 * idle_time(timeline, rank) / makespan : 0;
    text += fmt::format("{:>4}  {:<{}}  {:>4.1f} %  {}\n", rank, stage_texts[rank], width,
                        // Not "-0.0".
                        std::max(idle, 0.0),
                        live_text(live[rank], stages_of(schedule, static_cast<int>(rank)).size()));
  }
  return text;
}

}  // namespace lockstep::cli
