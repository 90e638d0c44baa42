// Who ends up in which group of a split.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <lockstep/comm/communicator.h>

namespace lockstep::comm::engines {

// `wishes` holds every rank's color and key, two numbers each. The group of the ranks that asked
// for the same color as this one.
inline GroupInfo plan_split(const GroupInfo& parent, const SplitRequest& request,
                            const std::int64_t* wishes) {
  std::vector<int> members;
  for (std::size_t rank = 0; rank < parent.global_ranks.size(); ++rank)
    if (wishes[2 * rank] == request.color) members.push_back(static_cast<int>(rank));
  std::stable_sort(members.begin(), members.end(),
                   [&](int a, int b) { return wishes[2 * a + 1] < wishes[2 * b + 1]; });

  GroupInfo child{.name = request.name,
                  .generation = parent.generation,
                  .journal = parent.journal,
                  .watch = parent.watch};
  child.global_ranks.clear();
  for (const int member : members) {
    if (member == parent.rank) child.rank = static_cast<int>(child.global_ranks.size());
    child.global_ranks.push_back(parent.global_ranks[static_cast<std::size_t>(member)]);
  }
  return child;
}

}  // namespace lockstep::comm::engines
