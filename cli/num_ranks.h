// How many ranks a host starts.
#pragma once

#include <string>

namespace lockstep::cli {

constexpr int kMostRanks = 1 << 16;

// What --nproc-per-node says: a number, auto, cpu, gpu, or gpu:N. UsageError otherwise, and where
// there are not so many GPUs.
int num_local_ranks(const std::string& text);

}  // namespace lockstep::cli
