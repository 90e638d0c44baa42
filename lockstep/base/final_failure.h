// For a rank to tell its launcher that a restart would not help it.
#pragma once

namespace lockstep {

// To be called before this process ends with an error that it would only meet again, such as a
// mistake in what its user asked for: `lockstep run --max-restarts` then makes no restart, however
// many are left, and ends the job on all hosts. Does nothing where no such launcher started this
// process, or where the process ends well all the same. Thread-safe, never throws.
void report_final_failure() noexcept;

}  // namespace lockstep
