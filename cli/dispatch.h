// From the command line to a verb.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::cli {

// The exit code after a UsageError.
inline constexpr int kUsageMistake = 2;

// The words after the verb.
using Arguments = std::span<const std::string>;

struct Verb {
  std::string_view name;
  std::string_view summary;
  // Null where the verb belongs to lockstep-torch, which is then executed with the same arguments.
  int (*run)(Arguments);
};

// Runs a command line: --help, --version, or a verb. Suggests the nearest verb for one that does
// not exist. Turns errors into a message and an exit code: 2 for a mistake of the user, 1
// otherwise.
int dispatch(std::span<const Verb> verbs, int argc, char** argv);

// Where lockstep-torch is: beside this program in a build tree, in libexec where installed.
// UsageError where it is not, on behalf of a verb.
std::filesystem::path torch_program(std::string_view verb);

// Becomes lockstep-torch with these words. Returns only by throwing UsageError.
[[noreturn]] void become_torch_program(std::string_view verb, char** argv);

}  // namespace lockstep::cli
