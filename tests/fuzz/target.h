// What is fuzzed: functions over bytes that must neither crash, nor take much memory or time, nor
// break the properties they check themselves. libFuzzer runs them (LOCKSTEP_FUZZ), and so does an
// ordinary test, with the corpus and a fixed number of mutations of it.
#pragma once

#include <cstddef>
#include <span>

namespace lockstep::fuzz {

// Aborts where a property does not hold.
void run(std::span<const std::byte> input);

// For targets: aborts with the text.
void require(bool condition, const char* property);

}  // namespace lockstep::fuzz
