// Ends what this process started, and what that started in turn.
#pragma once

#include <sys/types.h>

#include <vector>

#include <lockstep/base/deadline.h>

namespace lockstep::elastic {

// From now on, a descendant whose parent dies becomes a child of this process, whatever session or
// process group it moved to.
void adopt_orphans();

// Kills the children of this process with SIGKILL, then those it inherits from them, until none
// is left but those to be spared, with what descends from them. Returns those that are still there
// at the deadline (stuck inside the kernel).
std::vector<pid_t> kill_descendants(const Deadline& deadline,
                                    const std::vector<pid_t>& spared = {});

}  // namespace lockstep::elastic
