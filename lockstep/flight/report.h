// The dumps of all ranks read together: what the job hangs on, and which rank is where, in words.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <lockstep/base/deadline.h>
#include <lockstep/flight/dump.h>

namespace lockstep::flight {

// The answer comes first: which rank the others wait for, followed from group to group to the end
// of the chain. Then, for each group with calls in flight, which ranks are in which call since
// when, which are behind, which made other calls, and which left no dump. Ranks are the job's. They
// are compared by the numbers of their calls; times are differences on one rank's own clock, so
// clocks that differ between hosts change nothing. Ends in a newline; empty where there are no
// dumps.
//
//   rank 2 never called all_reduce #7 of group 'world' (train.cpp:42); ranks 0, 1 and 3 wait for
//   it, for 5.0 s now.
//     Rank 2's last call, barrier #6 of group 'world' (train.cpp:40), ended 7.2 s ago.
//
//   group 'world' (4 ranks):
//     ranks 0, 1 and 3 are in all_reduce #7 (sum of 1024 float32) called at train.cpp:42, for 5.0 s
//     rank 2 is behind: its last call, barrier #6 called at train.cpp:40, finished 7.2 s ago; it
//     never called #7
std::string merged_report(const std::vector<Dump>& dumps);

// The same for programs: "verdict", "findings", "groups".
std::string merged_report_json(const std::vector<Dump>& dumps);

// The dumps of a directory.
struct Evidence {
  std::vector<Dump> dumps;
  std::vector<std::string> left_out;  // what was not used, and why
};

// A file that cannot be read, and a dump from before the newest demand, is left out.
Evidence read_evidence(const std::filesystem::path& directory);

// Demands dumps of all processes that share the directory (dump.h), and waits until every rank of
// the job has answered, or until `longest`: one that is stopped never does.
Evidence demand_evidence(const std::filesystem::path& directory, milliseconds longest);

// The same for a directory as it is, and for dumps that were read from one.
std::string merged_report(const std::filesystem::path& directory);
std::string merged_report(const Evidence& evidence);
std::string merged_report_json(const Evidence& evidence);

// Whether some rank is in a call that does not look like one of a job at work: failed, or taking
// more than a second.
bool hangs(const std::vector<Dump>& dumps);

// Whether a dump in the directory was written because a call failed, or cannot be read.
bool tells_of_failures(const std::filesystem::path& directory);

}  // namespace lockstep::flight
