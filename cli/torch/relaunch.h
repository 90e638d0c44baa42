// Verbs that need several ranks start them themselves where no launcher has.
#pragma once

#include <string>
#include <vector>

#include <cli/dispatch.h>

namespace lockstep::cli {

// True where this process is a rank already.
bool launched();

// Becomes `lockstep run` of the same verb with the same arguments, on `num_ranks` ranks of this
// host. Returns only by throwing UsageError.
int relaunch(const std::string& verb, Arguments arguments, int num_ranks);

// The ranks' report, which they write into a file: the lines that they print carry their numbers in
// front.
struct Reported {
  int exit_code = 0;
  std::string text;  // that rank 0 wrote, where all went well
};

// Runs the verb on ranks of this host and waits for them. `--report FILE` is added to the
// arguments: rank 0 writes its report to that file, which is never one on disk.
Reported report_from_ranks(const std::string& verb, std::vector<std::string> arguments,
                           int num_ranks);

}  // namespace lockstep::cli
