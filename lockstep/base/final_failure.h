// For a rank to tell its launcher that a restart would not help it.
#pragma once

namespace lockstep {

// To be called before this process ends with an error that it would only meet again, such as a
// mistake in what its user asked for: `lockstep run --max-restarts` then makes no restart, however
// many are left, and ends the job on all hosts, also where other ranks have failed because of this
// one and were heard of first. Does nothing where no such launcher started this process, where the
// launcher has told it to end before, or where the process ends well all the same. Thread-safe,
// never throws.
void report_final_failure() noexcept;

}  // namespace lockstep
