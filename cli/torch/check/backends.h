// Which backends work on this machine: each is really used, not only looked for.
#pragma once

#include <vector>

#include <lockstep/base/deadline.h>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

// Adds up numbers between two ranks over every backend of this build (one rank for nccl and mpi),
// each in a process of its own: what crashes or hangs there is an answer like any other. The
// backends that this build lacks are listed with what they need.
//
// Forks: call it before anything has started threads or a GPU. Returns by the deadline.
std::vector<Backend> try_backends(Deadline deadline);

}  // namespace lockstep::cli::inspection
