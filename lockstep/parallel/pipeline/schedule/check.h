// Whether a schedule can be run, proved before anyone runs it.
#pragma once

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// Returns where every rank would come to the end of its list, having done the forward and the
// backward of every micro-batch through every stage once: each stage on a rank that is there, each
// action where its stage is, backward after forward and weights after the input, each transfer at
// both its ends and in the same order at both, and no rank waiting for another that waits for it.
// UsageError otherwise, which names the rank, the action and its position, from 0.
void check(const Schedule& schedule);

}  // namespace lockstep::pipeline
