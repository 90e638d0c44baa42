// Calls by which a rank's own program reports to the launcher. Both do nothing where no `lockstep
// run` started this process; they are thread-safe and never throw.
#pragma once

#include <cstdint>

namespace lockstep {

// How far this rank has come: a number that changes with every step of its work. With `lockstep run
// --stuck-after SECONDS`, a rank whose number has not changed for that long counts as stuck. Costs
// one store to memory.
void report_progress(std::uint64_t step) noexcept;

// Call this before the process ends with an error that a restart would meet again, such as a
// mistake of its user. `lockstep run --max-restarts` then makes no restart, however many are left,
// and ends the job on all hosts, even where the launcher has heard first of other ranks that failed
// because of this one. It has no effect where the launcher has told this process to end before, or
// where the process ends well all the same.
void report_final_failure() noexcept;

}  // namespace lockstep
