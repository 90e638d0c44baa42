// The flags of `lockstep train`, which the launching program and its ranks read alike.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <cli/dispatch.h>

namespace lockstep::cli {

// The exit code of a `lockstep train` that gave up and said why: a loss that is no number, a disk
// that is full.
inline constexpr int kTrainingStopped = 3;

// The flags of `lockstep train`, which the launching program and its ranks read alike. Numbers are
// texts as the user wrote them.
struct TrainFlags {
  std::string config;
  std::vector<std::string> overrides;  // --set
  std::string num_ranks;               // --nproc-per-node
  std::string max_restarts;
  std::string spares;
  std::string stuck_after;
  bool describe = false;  // show who holds what, and train nothing
  std::string svg;        // --describe draws its picture into this file
  std::string num_hosts;  // --nnodes: --describe shows so many hosts
  std::string output;     // the main rank writes its lines here; empty: to standard output
};

// Nothing where help or the schema was asked for, which was printed. UsageError where the flags
// make no sense.
std::optional<TrainFlags> parse_train_flags(Arguments arguments);

}  // namespace lockstep::cli
