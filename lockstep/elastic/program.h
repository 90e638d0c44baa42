// What to execute as a rank.
#pragma once

#include <string>
#include <vector>

namespace lockstep::elastic {

enum class ProgramKind {
  automatic,  // a file ending in .py is a Python script, anything else is executed as it is
  executable,
  python_module,
};

// Finds the program and returns the whole command, the first word being a path that can be
// executed. UsageError names the paths that were tried and what to do.
std::vector<std::string> resolve_command(const std::vector<std::string>& words, ProgramKind kind);

}  // namespace lockstep::elastic
