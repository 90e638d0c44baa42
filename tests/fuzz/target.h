// Fuzz targets: functions over bytes that must not crash, must not take much memory or time, and
// must keep the properties that they check themselves. libFuzzer runs them (LOCKSTEP_FUZZ), and so
// does an ordinary test, with the corpus and a fixed number of mutations of it.
#pragma once

#include <cstddef>
#include <span>

namespace lockstep::fuzz {

// Aborts if a property does not hold.
void run(std::span<const std::byte> input);

// Aborts with the text if the condition is false. Targets call it.
void require(bool condition, const char* property);

}  // namespace lockstep::fuzz
