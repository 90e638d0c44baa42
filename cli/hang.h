// `lockstep check hang DIR`: what a job hangs on, from the dumps of its ranks.
#pragma once

#include <cli/dispatch.h>

namespace lockstep::cli {

// Exit status: 0 where nothing hangs, 1 where something does or has failed, 2 for a mistake.
int check_hang(Arguments arguments);

}  // namespace lockstep::cli
