// Calls by which a rank's own program tells the launcher how it gets on. Both do nothing where no
// such launcher started this process; they are thread-safe and never throw.
#pragma once

#include <cstdint>

namespace lockstep {

// How far this rank has come: a number that changes with every step of its work. With `lockstep run
// --stuck-after SECONDS`, a rank whose number has not changed for that long counts as stuck. Costs
// one store to memory.
void report_progress(std::uint64_t step) noexcept;

// To be called before this process ends with an error that it would only meet again, such as a
// mistake in what its user asked for. `lockstep run --max-restarts` then makes no restart, however
// many are left, and ends the job on all hosts, even where other ranks have failed because of this
// one and were heard of first. It has no effect where the launcher has told this process to end
// before, or where the process ends well all the same.
void report_final_failure() noexcept;

}  // namespace lockstep
