// Latency and bandwidth between ranks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include <lockstep/comm/communicator.h>

#include <cli/torch/check/report.h>

namespace lockstep::cli::inspection {

using RankPair = std::pair<int, int>;

// Which pairs of `num_ranks` ranks are measured: all of up to 16 ranks, otherwise neighbours and a
// sample, 256 at most. The same on every rank.
std::vector<RankPair> choose_pairs(int num_ranks);

// Measures them one after the other, while all other ranks wait: messages to and fro, one way being
// half of the median. A pair that looks much slower than others of its kind is measured a second
// time, and the better figures count. Bounded in time: slow links get fewer and smaller messages.
// Every rank calls it, and all get the whole result. CommError as the communicator throws it.
std::vector<Pair> measure_pairs(comm::Communicator& world, const std::vector<Rank>& ranks,
                                at::DeviceType device);

// Indices of the pairs that are much slower than the median of those with the same transport.
std::vector<std::size_t> slow_pairs(const std::vector<Pair>& pairs);

}  // namespace lockstep::cli::inspection
