// launch::launch(), from a program that has threads.
#pragma once

#include <lockstep/launch/launch.h>

namespace lockstep {

// A launcher takes over its process, which must have one thread: libraries that LibTorch loads
// start some before main(). So it has a process of its own here. This one waits for it, passes on
// the signals that would end it, and throws what the launcher throws, as a UsageError or an Error.
int launch_in_child(const launch::LaunchOptions& options);

}  // namespace lockstep
