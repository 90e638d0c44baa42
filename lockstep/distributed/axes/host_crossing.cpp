#include <lockstep/distributed/axes/host_crossing.h>

#include <map>
#include <numeric>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep {

namespace {

std::map<int, std::vector<int>> ranks_by_host(const std::vector<int>& ranks,
                                              const std::vector<int>& hosts) {
  std::map<int, std::vector<int>> found;
  for (std::size_t i = 0; i < ranks.size(); ++i) found[hosts[i]].push_back(ranks[i]);
  return found;
}

}  // namespace

std::optional<HostCrossing> host_crossing(const mesh::MeshShape& shape, const std::string& axis,
                                          const std::vector<int>& host_of_rank) {
  LOCKSTEP_CHECK(host_of_rank.size() == static_cast<std::size_t>(shape.world_size()),
                 "{} hosts for {} ranks", host_of_rank.size(), shape.world_size());
  HostCrossing crossing;
  for (int rank = 0; rank < shape.world_size(); ++rank) {
    if (shape.coordinate(rank, axis) != 0) continue;
    const std::vector<int> ranks = shape.group_of(rank, {axis});
    std::vector<int> hosts;
    for (const int member : ranks) hosts.push_back(host_of_rank[static_cast<std::size_t>(member)]);
    const auto by_host = ranks_by_host(ranks, hosts);
    if (by_host.size() == 1) continue;
    if (crossing.num_groups++ > 0) continue;
    crossing.ranks = ranks;
    crossing.hosts = hosts;
  }
  if (crossing.num_groups == 0) return std::nullopt;
  crossing.inside = shape.size(axis);
  std::map<int, int> ranks_on_host;
  for (const int host : host_of_rank) ++ranks_on_host[host];
  for (const auto& [host, num_ranks] : ranks_on_host)
    crossing.inside = std::gcd(crossing.inside, num_ranks);
  return crossing;
}

std::string to_text(const HostCrossing& crossing) {
  std::string text;
  for (const auto& [host, ranks] : ranks_by_host(crossing.ranks, crossing.hosts))
    text += fmt::format("{}{} of host {}", text.empty() ? "ranks " : " with ",
                        fmt::join(ranks, ", "), host);
  return text;
}

}  // namespace lockstep
