// The picture of a pipeline's step, as it was measured.
#pragma once

#include <filesystem>

#include <lockstep/parallel/pipeline/schedule/timeline.h>
#include <lockstep/train/config.h>
#include <lockstep/train/pipeline_plan.h>

namespace lockstep::train {

std::filesystem::path timeline_file(const TrainConfig& config);

// A picture that cannot be written costs a warning, never the run: false then.
bool draw_timeline(const pipeline::Timeline& timeline, const TrainConfig& config,
                   const PipelinePlan& plan);

}  // namespace lockstep::train
