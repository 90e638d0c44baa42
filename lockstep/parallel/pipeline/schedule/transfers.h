// From what ranks compute to what they send each other.
#pragma once

#include <lockstep/parallel/pipeline/schedule/schedule.h>

namespace lockstep::pipeline {

// The same schedule with its sends and receives. `schedule` has only actions that compute, each
// forward and each backward of them once. A result is sent as soon as it is there. A receive starts
// before the action ahead of the one that needs it, so that it hides behind that, or before that
// where the order of its channel asks for it.
Schedule with_transfers(const Schedule& schedule);

}  // namespace lockstep::pipeline
