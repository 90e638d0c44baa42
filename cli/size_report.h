// `lockstep train --describe --nnodes MIN:MAX`: what a run's batch comes to on each number of
// hosts.
#pragma once

#include <string>

#include <lockstep/train/preflight/run_plan.h>

namespace lockstep::cli {

struct HostRange {
  int least = 1;
  int most = 1;
};

// "3", or "2:4". UsageError where it is neither, or there are too many of them.
HostRange parse_host_range(const std::string& text);

// A row for each: samples of a rank, and its passes. `run` is the one on the most hosts.
std::string size_report(const train::TrainConfig& config, const train::ResolvedRun& run,
                        const HostRange& hosts, int ranks_per_host);

}  // namespace lockstep::cli
