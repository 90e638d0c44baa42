// The dumps of all ranks read together: which rank is where, in words.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/flight/dump.h>

namespace lockstep::flight {

// For each group, those in trouble first: who is in which call since when, who is behind, whose
// calls do not match, who left no dump. Ranks are compared by the numbers of their calls; times
// are differences on one rank's own clock, so clocks that differ between hosts change nothing.
// Ends in a newline; empty where there are no dumps.
//
//   group 'world' (4 ranks):
//     ranks 0, 1 and 3 are in all_reduce #7 (sum of 1024 float32) called at train.cpp:42, for 5.0 s
//     rank 2 is behind: its last call, barrier #6 called at train.cpp:40, finished 7.2 s ago; it
//     never called #7
std::string merged_report(const std::vector<Dump>& dumps);

// The same for every dump in a directory. A file that cannot be read is named in the report.
std::string merged_report(const std::filesystem::path& directory);

}  // namespace lockstep::flight
