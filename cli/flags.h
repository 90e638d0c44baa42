// Flags as torchrun takes them, and those that several programs of ours read alike.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <lockstep/base/deadline.h>

#include <cli/dispatch.h>

namespace lockstep::cli {

// Sets what --help prints after the program's name: "[FLAGS] PROGRAM [ARGUMENTS]".
void show_usage(CLI::App& app, const std::string& what_follows);

struct SplitArguments {
  std::vector<std::string> flags;    // spelled with dashes
  std::vector<std::string> program;  // the program and all that is its own
};

// Finds where the program begins: the first word that is neither a flag of `app` nor the value of
// one, or what follows "--". Flags may be spelled with underscores. UsageError for a flag that
// `app` does not have, with the nearest that it has.
SplitArguments split_at_program(const CLI::App& app, Arguments arguments);

// The flags of a verb that starts no program, with words between them where `words` are allowed.
// UsageError for more of them.
SplitArguments split_at_words(const CLI::App& app, Arguments arguments, std::size_t words);

// Parses flags that are all known. Returns false where help was asked for, having printed it.
// UsageError where a value is missing or wrong.
bool parse_flags(CLI::App& app, std::vector<std::string> flags);

// A whole number of at least `lowest`; UsageError names the flag, the text and `example`.
int parse_integer(const std::string& text, const std::string& flag, int lowest, int highest);

// "30" or "0.5". UsageError names the flag and the text.
milliseconds parse_seconds(const std::string& text, const std::string& flag);

inline constexpr int kMostRanks = 1 << 16;

// How many ranks --nproc-per-node asks for: a number, auto, cpu, gpu, or gpu:N. UsageError
// otherwise, and where there are not so many GPUs.
int num_local_ranks(const std::string& text);

}  // namespace lockstep::cli
