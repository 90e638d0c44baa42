#include <lockstep/train/timeline_file.h>

#include <lockstep/base/durable_file.h>
#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/parallel/pipeline/schedule/drawing.h>

namespace lockstep::train {

std::filesystem::path timeline_file(const TrainConfig& config) {
  return config.output / "timeline.svg";
}

bool draw_timeline(const pipeline::Timeline& timeline, const TrainConfig& config,
                   const PipelinePlan& plan) {
  const std::string title =
      fmt::format("{}, measured in step {}", plan.schedule.name, config.parallel.timeline_step);
  const std::string subtitle =
      fmt::format("{} ranks, {} stages, {} micro-batches", plan.schedule.num_ranks(),
                  plan.schedule.num_stages(), plan.schedule.num_micro_batches);
  try {
    write_durably(
        timeline_file(config),
        pipeline::draw_svg(timeline, {.title = title, .subtitle = subtitle, .time_unit = "s"}));
    return true;
  } catch (const FileError& error) {
    log::warn("the timeline of step {} was not drawn: {}", config.parallel.timeline_step,
              error.what());
    return false;
  }
}

}  // namespace lockstep::train
