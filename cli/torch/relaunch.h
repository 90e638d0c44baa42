// Verbs that need several ranks start them themselves where no launcher has.
#pragma once

#include <string>

#include <cli/dispatch.h>

namespace lockstep::cli {

// True where this process is a rank already.
bool launched();

// Becomes `lockstep run` of the same verb with the same arguments, on `num_ranks` ranks of this
// host. Returns only by throwing UsageError.
int relaunch(const std::string& verb, Arguments arguments, int num_ranks);

}  // namespace lockstep::cli
