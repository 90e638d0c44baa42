// For a rank to tell its launcher that it gets on.
#pragma once

#include <cstdint>

namespace lockstep {

// How far this rank has come: a number that changes with every step of its work. With `lockstep run
// --stuck-after SECONDS`, a rank whose number has not changed for that long is taken for stuck.
// Does nothing where no such launcher started this process. Thread-safe, never throws; costs one
// store to memory.
void report_progress(std::uint64_t step) noexcept;

}  // namespace lockstep
