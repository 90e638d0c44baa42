// The flags of `lockstep train`, which the launching program and its ranks read alike.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <cli/dispatch.h>

namespace lockstep::cli {

// The exit code of a run that gave up and said why: a loss that is no number, a disk that is full.
inline constexpr int kTrainingStopped = 3;

struct TrainFlags {
  std::string config;
  std::vector<std::string> overrides;  // --set
  std::string num_ranks;               // --nproc-per-node, as it is written
  std::string max_restarts;            // as it is written
  std::string spares;                  // as it is written
  std::string stuck_after;             // as it is written
  bool describe = false;               // who holds what is shown, and nothing trained
  std::string svg;                     // a file for a picture of that
  std::string num_hosts;               // that it is shown for, as it is written
  std::string output;                  // where the main rank speaks; empty: standard output
};

// Nothing where help or the schema was asked for, which was printed. UsageError where the flags
// make no sense.
std::optional<TrainFlags> parse_train_flags(Arguments arguments);

}  // namespace lockstep::cli
