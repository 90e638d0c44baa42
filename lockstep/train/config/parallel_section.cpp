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

// What only a pipeline has.
void read_pipeline(JsonSection& section, const PathReader& paths, ParallelSection& parallel) {
  const bool scheduled = section.choice("schedule", parallel.schedule, kPipelineSchedules);
  const bool chunked = section.integer("chunks", parallel.chunks, 1, kMostChunks);
  const bool from_file = paths.read(section, "schedule_file", parallel.schedule_file);
  const bool balanced = section.choice("balance", parallel.balance, kStageBalances);
  const bool given = section.integers("stage_layers", parallel.stage_layers, 1, kMostOnAnAxis);
  const bool drawn = section.integer("timeline_step", parallel.timeline_step, 0, kMostSteps);
  if (!section.sound({"pipeline"})) return;
  if (parallel.pipeline == 1) {
    const std::pair<const char*, bool> set[] = {
        {"schedule", scheduled},      {"chunks", chunked},
        {"schedule_file", from_file}, {"balance", balanced},
        {"stage_layers", given},      {"timeline_step", drawn && parallel.timeline_step > 0}};
    for (const auto& [key, is_set] : set)
      if (is_set)
        section.mistake(key, "is set, and there is no pipeline: set pipeline, or remove it");
    return;
  }
  if (from_file && (scheduled || chunked))
    section.mistake("schedule_file", fmt::format("is set, and so is {}: the file says it all, so "
                                                 "remove one of them",
                                                 scheduled ? "schedule" : "chunks"));
  if (balanced && given)
    section.mistake("stage_layers", "is set, and so is balance: layers are given, or balanced");
  if (!section.sound({"schedule", "chunks"})) return;
  if (chunked && !has_chunks(parallel.schedule) && parallel.chunks != 1)
    section.mistake("chunks",
                    fmt::format("is {}, and the schedule \"{}\" has one stage a rank: "
                                "take \"interleaved\", or remove it",
                                parallel.chunks, name_of(parallel.schedule, kPipelineSchedules)));
  if (parallel.schedule == PipelineSchedule::zb_v && parallel.chunks > 0 && parallel.chunks != 2)
    section.mistake("chunks", fmt::format("is {}, and \"zb-v\" has two stages a rank: remove it",
                                          parallel.chunks));
}

// DeepSpeed's name of an axis of `parallel`, where 0 and 1 are none. Whether it asks for one.
bool read_old_axis(JsonSection& there, std::string_view key, JsonSection& parallel,
                   std::string_view axis, std::int64_t& size) {
  std::int64_t asked = 0;
  if (!there.integer(key, asked, 0, kMostOnAnAxis) || asked <= 1) return false;
  if (parallel.find(axis) != nullptr && asked != size && parallel.sound({axis}))
    there.mistake(key,
                  fmt::format("is {}, but parallel.{} is {}: set one of them", asked, axis, size));
  size = asked;
  return true;
}

}  // namespace

void read_parallel(JsonSection& top, const PathReader& paths, ParallelSection& parallel) {
  JsonSection section = top.section("parallel");
  section.integer("data", parallel.data, -1, kMostOnAnAxis);
  if (parallel.data == 0)
    section.mistake("data", "is 0: give the ranks that have samples of their own, or -1 for all "
                            "that the other axes leave");
  section.integer("tensor", parallel.tensor, 1, kMostOnAnAxis);
  section.integer("pipeline", parallel.pipeline, 1, kMostOnAnAxis);
  section.integer("context", parallel.context, 1, kMostOnAnAxis);
  JsonSection tensor_parallel = top.section("tensor_parallel");
  read_old_axis(tensor_parallel, "autotp_size", section, "tensor", parallel.tensor);
  read_old_axis(top, "data_parallel_size", section, "data", parallel.data);
  // DeepSpeed's Ulysses.
  if (read_old_axis(top, "sequence_parallel_size", section, "context", parallel.context))
    parallel.context_algorithm = ContextExchange::all_to_all;
  if (section.boolean("sequence_parallel", parallel.sequence_parallel) &&
      parallel.sequence_parallel && parallel.tensor == 1 && section.sound({"tensor"}))
    section.mistake("sequence_parallel",
                    "is true, and there is no tensor axis whose ranks could share the sequence "
                    "between layers: set tensor, or remove it");
  section.choice("context_algorithm", parallel.context_algorithm, kContextExchanges);
  read_pipeline(section, paths, parallel);
}

}  // namespace lockstep::train
