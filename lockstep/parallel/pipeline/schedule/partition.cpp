#include <lockstep/parallel/pipeline/schedule/partition.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::pipeline {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

void check_counts(int num_blocks, int num_stages) {
  if (num_stages < 1)
    throw UsageError("a model is to be cut into {} stages: at least 1 is needed", num_stages);
  if (num_stages > num_blocks)
    throw UsageError("{} block{} cannot be cut into {} stages, each of which has at least one: "
                     "choose no more than {} stages (ranks × stages a rank)",
                     num_blocks, num_blocks == 1 ? "" : "s", num_stages, num_blocks);
}

// sums[b] is the cost of the blocks before b.
std::vector<double> sums_before(const std::vector<double>& costs) {
  std::vector<double> sums = {0};
  for (const double cost : costs) {
    if (!std::isfinite(cost) || cost < 0)
      throw UsageError("block {} of a model is said to cost {}: it must be a number from 0 on",
                       sums.size() - 1, cost);
    sums.push_back(sums.back() + cost);
  }
  return sums;
}

// The best cuts of the blocks before each end, for one more stage at a time. `join` adds a stage's
// cost to the value of the stages before it; the lowest value is the best.
template <typename Join>
std::vector<std::vector<int>> best_starts(const std::vector<double>& sums, int num_stages,
                                          double& best, const Join& join) {
  const std::size_t ends = sums.size();
  std::vector<std::vector<int>>
      starts;  // starts[stage][end]: where this stage begins if it ends at `end`
  std::vector<double> before(ends, kNever);
  before[0] = 0;
  for (int stage = 0; stage < num_stages; ++stage) {
    std::vector<double> now(ends, kNever);
    std::vector<int>& start = starts.emplace_back(ends, 0);
    for (std::size_t end = 1; end < ends; ++end)
      for (std::size_t begin = 0; begin < end; ++begin) {
        const double value = join(before[begin], sums[end] - sums[begin]);
        // The later of two equal cuts wins: layers that cost nothing stay with the layer before
        // them.
        if (value > now[end]) continue;
        now[end] = value;
        start[end] = static_cast<int>(begin);
      }
    before = std::move(now);
  }
  best = before.back();
  return starts;
}

}  // namespace

Cuts partition(const std::vector<double>& costs, int num_stages) {
  const int num_blocks = static_cast<int>(costs.size());
  check_counts(num_blocks, num_stages);
  const std::vector<double> sums = sums_before(costs);
  double dearest = 0;
  best_starts(sums, num_stages, dearest,
              [](double before, double cost) { return std::max(before, cost); });
  // The slack is for rounded sums.
  const double most = dearest + 1e-9 * sums.back();
  double squares = 0;
  const auto starts = best_starts(sums, num_stages, squares, [&](double before, double cost) {
    return cost > most ? kNever : before + cost * cost;
  });
  Cuts cuts(static_cast<std::size_t>(num_stages) + 1, num_blocks);
  for (auto stage = static_cast<std::size_t>(num_stages); stage-- > 0;)
    cuts[stage] = starts[stage][static_cast<std::size_t>(cuts[stage + 1])];
  return cuts;
}

void check_cuts(const Cuts& cuts, int num_blocks, int num_stages) {
  check_counts(num_blocks, num_stages);
  const bool right = static_cast<int>(cuts.size()) == num_stages + 1 && cuts.front() == 0 &&
                     cuts.back() == num_blocks &&
                     std::ranges::adjacent_find(cuts, std::ranges::greater_equal()) == cuts.end();
  if (!right)
    throw UsageError("[{}] does not cut {} blocks into {} stages: give {} numbers that rise from 0 "
                     "to {}",
                     fmt::join(cuts, ", "), num_blocks, num_stages, num_stages + 1, num_blocks);
}

}  // namespace lockstep::pipeline
