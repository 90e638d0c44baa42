// `lockstep plan schedule`: a pipeline schedule, drawn, before anything runs it.
#pragma once

#include <cli/dispatch.h>

namespace lockstep::cli {

int plan_schedule(Arguments arguments);

}  // namespace lockstep::cli
