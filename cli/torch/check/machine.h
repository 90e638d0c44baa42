// Looks at the machine this process runs on.
#pragma once

#include <lockstep/base/environment.h>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

// What this process has; once the job is joined, its open files are counted in.
Rank describe_rank(const LaunchEnvironment& launch);

// The machine; the number formats are tried out only by the first rank of a host, so that ranks do
// not disturb each other's figures.
Host describe_host(const LaunchEnvironment& launch);

}  // namespace lockstep::cli::inspection
