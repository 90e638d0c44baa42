#include <lockstep/distributed/neighbours.h>

#include <algorithm>
#include <map>

namespace lockstep {

// With the ranks of each host side by side in a circle, a turn by as many places as the largest
// host has ranks takes every rank of every host off it, as far as there are others.
std::vector<int> keepers(const std::vector<std::string>& host_of_rank) {
  std::map<std::string, std::vector<int>> by_host;
  for (std::size_t rank = 0; rank < host_of_rank.size(); ++rank)
    by_host[host_of_rank[rank]].push_back(static_cast<int>(rank));
  std::vector<std::vector<int>> hosts;
  hosts.reserve(by_host.size());
  for (auto& [host, ranks] : by_host) hosts.push_back(std::move(ranks));
  std::ranges::sort(hosts);
  std::vector<int> circle;
  std::size_t turn = 0;
  for (const std::vector<int>& ranks : hosts) {
    circle.insert(circle.end(), ranks.begin(), ranks.end());
    turn = std::max(turn, ranks.size());
  }
  if (hosts.size() == 1) turn = 1;
  std::vector<int> keeper(circle.size());
  for (std::size_t i = 0; i < circle.size(); ++i)
    keeper[static_cast<std::size_t>(circle[i])] = circle[(i + turn) % circle.size()];
  return keeper;
}

}  // namespace lockstep
