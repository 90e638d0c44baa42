#include <lockstep/train/config/names.h>
#include <lockstep/train/config/sections.h>

#include <lockstep/base/error.h>

namespace lockstep::train {

namespace {

constexpr std::int64_t kMostOnAnAxis = 1 << 20;
constexpr std::int64_t kMostChunks = 64;

bool has_chunks(PipelineSchedule schedule) {
  return schedule == PipelineSchedule::interleaved || schedule == PipelineSchedule::zb_v;
}

}  // namespace

void read_parallel(JsonSection& top, ParallelSection& parallel) {
  JsonSection section = top.section("parallel");
  section.integer("data", parallel.data, -1, kMostOnAnAxis);
  if (parallel.data == 0)
    section.mistake("data", "is 0: give the ranks that have samples of their own, or -1 for all "
                            "that the other axes leave");
  section.integer("tensor", parallel.tensor, 1, kMostOnAnAxis);
  section.integer("pipeline", parallel.pipeline, 1, kMostOnAnAxis);
  section.integer("context", parallel.context, 1, kMostOnAnAxis);
  if (section.boolean("sequence_parallel", parallel.sequence_parallel) &&
      parallel.sequence_parallel && parallel.tensor == 1)
    section.mistake("sequence_parallel",
                    "is true, and there is no tensor axis whose ranks could share the sequence "
                    "between layers: set tensor, or remove it");
  section.choice("context_algorithm", parallel.context_algorithm, kContextExchanges);
  const bool scheduled = section.choice("schedule", parallel.schedule, kPipelineSchedules);
  if (scheduled && parallel.pipeline == 1)
    section.mistake("schedule", fmt::format("is \"{}\", and there is no pipeline to run by it: set "
                                            "pipeline, or remove it",
                                            name_of(parallel.schedule, kPipelineSchedules)));
  if (section.integer("chunks", parallel.chunks, 1, kMostChunks) &&
      !has_chunks(parallel.schedule) && parallel.chunks != 1)
    section.mistake("chunks",
                    fmt::format("is {}, and the schedule \"{}\" has one stage a rank: "
                                "take \"interleaved\", or remove it",
                                parallel.chunks, name_of(parallel.schedule, kPipelineSchedules)));
  if (parallel.schedule == PipelineSchedule::zb_v && parallel.chunks > 0 && parallel.chunks != 2)
    section.mistake("chunks", fmt::format("is {}, and \"zb-v\" has two stages a rank: remove it",
                                          parallel.chunks));
}

std::int64_t ParallelSection::stages() const {
  const std::int64_t own = has_chunks(schedule) ? 2 : 1;
  return pipeline * (chunks > 0 ? chunks : own);
}

}  // namespace lockstep::train
