// Runs `lockstep check` again, as the ranks of a job on this host.
#pragma once

#include <string>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

struct Relaunched {
  int exit_code = 0;  // of the launcher; where it is not 0 there is no report, and it has said why
  Report report;
};

// Starts `lockstep run` with that many ranks, waits for it, and reads the report that rank 0 left:
// printed by a rank, its lines would carry the rank. Whoever ends this process ends the ranks too.
Relaunched check_with_ranks(int num_ranks, const std::string& backend);

}  // namespace lockstep::cli::inspection
