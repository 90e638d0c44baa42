// `lockstep plan schedule`: a pipeline schedule, drawn, before anything runs it.
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <spdlog/fmt/fmt.h>
#include <spdlog/fmt/ranges.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>
#include <lockstep/parallel/pipeline/schedule/registry.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/schedule/schedule_file.h>
#include <lockstep/parallel/pipeline/schedule/timeline.h>

#include <cli/flags.h>

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

// The bubble between each rank's own first and last action, if it is less than that of the whole
// step.
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

// "4 ranks with 2 stages each, 8 micro-batches"
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

// The same for a drawing, with the bubble that is left where no rank waits for the others between
// steps.
std::string about_drawing(const Schedule& schedule, const Timeline& timeline) {
  const auto own = bubble_on_its_own(timeline);
  return about_schedule(schedule) +
         (own ? fmt::format("; {:.1f} % between a rank's first action and its last", 100 * *own)
              : "");
}

// The bubble, and for each rank its stages, how long it is idle and how much it holds.
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

// The values of the flags, as they were given; empty where one was not.
struct ScheduleFlags {
  std::string kind;
  std::string stages;
  std::string micro_batches;
  std::string chunks;
  std::string forward = "1";
  std::string backward = "1";
  std::string weight = "1";
  std::string transfer = "0";
  std::string read;
  std::string write;
  std::string svg;
};

std::optional<ScheduleFlags> parse_schedule_flags(Arguments arguments) {
  CLI::App app(
      "Draws a pipeline schedule: what each rank computes when, how long it is idle, and how\n"
      "many micro-batches it holds at once.",
      "lockstep plan schedule");
  show_usage(app, "--stages 4 --micro-batches 8 [FLAGS], or --read FILE [FLAGS]");
  app.footer("Examples: lockstep plan schedule --kind zb-v --stages 4 --micro-batches 8\n"
             "          lockstep plan schedule --stages 8 --micro-batches 32 --svg schedule.svg\n"
             "docs/pipeline.md has the kinds, and what files of schedules look like.");
  ScheduleFlags flags;
  std::vector<std::string_view> kinds;
  for (const pipeline::ScheduleKind kind : pipeline::schedule_kinds())
    kinds.push_back(pipeline::name_of(kind));
  app.add_option("--kind", flags.kind, fmt::format("one of {} (1f1b)", fmt::join(kinds, ", ")));
  app.add_option("--stages", flags.stages, "ranks that the model is cut among");
  app.add_option("--micro-batches", flags.micro_batches, "that a batch is cut into");
  app.add_option("--chunks", flags.chunks, "pieces of the model on each rank, for interleaved (2)");
  app.add_option("--forward", flags.forward,
                 "time that a rank's part of the model takes for a micro-batch (1)");
  app.add_option("--backward", flags.backward, "the same for its input's gradient (1)");
  app.add_option("--weight", flags.weight, "the same for its weights' gradients (1)");
  app.add_option("--transfer", flags.transfer, "time that goes by from rank to rank (0)");
  app.add_option("--svg", flags.svg, "a file for the drawing");
  app.add_option("--write", flags.write, "a file for the schedule");
  app.add_option("--read", flags.read, "the file of a schedule, in place of --kind and sizes");
  SplitArguments split = split_at_words(app, arguments, 0);
  if (!parse_flags(app, std::move(split.flags))) return std::nullopt;
  return flags;
}

double parse_time(const std::string& text, const char* flag) {
  double time = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), time);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(time) ||
      time < 0 || time > 1e12)
    throw UsageError("{} is '{}': it must be a time, in any unit, from 0 to 1e12", flag, text);
  return time;
}

pipeline::Schedule schedule_of(const ScheduleFlags& flags) {
  const std::pair<const char*, const std::string&> sizes[] = {
      {"--stages", flags.stages}, {"--micro-batches", flags.micro_batches}};
  if (!flags.read.empty()) {
    for (const auto& [flag, value] :
         {std::pair<const char*, const std::string&>("--kind", flags.kind),
          sizes[0],
          sizes[1],
          {"--chunks", flags.chunks}})
      if (!value.empty())
        throw UsageError("{} and --read were given, and the file says it all: leave one out", flag);
    return pipeline::read_schedule(flags.read);
  }
  for (const auto& [flag, value] : sizes)
    if (value.empty())
      throw UsageError("{} is missing: lockstep plan schedule --stages 4 --micro-batches 8", flag);
  return pipeline::make_schedule(
      flags.kind.empty() ? pipeline::ScheduleKind::one_forward_one_backward
                         : pipeline::schedule_kind_named(flags.kind),
      {.num_ranks = parse_integer(flags.stages, "--stages", 1, kMostRanks),
       .num_micro_batches = parse_integer(flags.micro_batches, "--micro-batches", 1, 1 << 20),
       .num_chunks = flags.chunks.empty() ? 0 : parse_integer(flags.chunks, "--chunks", 1, 1024)});
}

// A rank's time, divided among its stages.
pipeline::SimulatedTimes times_of(const ScheduleFlags& flags, const pipeline::Schedule& schedule) {
  const double stages_a_rank =
      static_cast<double>(schedule.num_stages()) / static_cast<double>(schedule.num_ranks());
  const pipeline::StageTimes stage = {
      .forward = parse_time(flags.forward, "--forward") / stages_a_rank,
      .backward_input = parse_time(flags.backward, "--backward") / stages_a_rank,
      .backward_weight = parse_time(flags.weight, "--weight") / stages_a_rank};
  if (stage.forward + stage.backward_input + stage.backward_weight <= 0)
    throw UsageError("--forward, --backward and --weight are all 0: there is nothing to draw");
  return {.stages = {stage}, .transfer = parse_time(flags.transfer, "--transfer")};
}

}  // namespace

int plan_schedule(Arguments arguments) {
  const auto flags = parse_schedule_flags(arguments);
  if (!flags) return 0;
  const pipeline::Schedule schedule = schedule_of(*flags);
  const pipeline::Timeline timeline = pipeline::simulate(schedule, times_of(*flags, schedule));
  if (!flags->write.empty()) pipeline::write_schedule(flags->write, schedule);
  if (!flags->svg.empty())
    write_durably(flags->svg,
                  pipeline::draw_svg(timeline, {.title = schedule.name,
                                                .subtitle = about_drawing(schedule, timeline)}));
  const bool live = observe::is_live_terminal(STDOUT_FILENO);
  fmt::print("{}: {}\n\n{}\n{}", schedule.name, about_schedule(schedule),
             pipeline::draw_text(
                 timeline, {.width = observe::terminal_width(STDOUT_FILENO),
                            .characters = observe::locale_characters(),
                            .colour = live ? observe::wanted_colour() : observe::Colour::none}),
             schedule_table(schedule, timeline));
  return 0;
}

}  // namespace lockstep::cli
