// Whether what the ranks of a pipeline were given fits together.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm/communicator.h>
#include <lockstep/parallel/pipeline/schedule/schedule.h>
#include <lockstep/parallel/pipeline/stage.h>

namespace lockstep::pipeline {

// Every rank calls it before it makes anything, so that none waits for one that gave up. UsageError
// on the rank that was given what cannot be run, and one that names that rank on all others; on all
// of them where their schedules or tied parameters differ.
//
// Returns a group of the same ranks for the pipeline's own calls: when a pipeline ends, it ends
// with it, and not with the caller's.
std::shared_ptr<comm::Communicator> agreed_group(const Schedule& schedule,
                                                 const std::map<int, Stage>& stages,
                                                 const PipelineOptions& options,
                                                 comm::Communicator& group);

}  // namespace lockstep::pipeline
