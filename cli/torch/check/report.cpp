#include <cli/torch/check/report.h>

#include <algorithm>
#include <set>

namespace lockstep::cli::inspection {

bool Report::can_train() const {
  return std::none_of(problems.begin(), problems.end(),
                      [](const Problem& problem) { return problem.prevents_training; });
}

std::vector<Host> merge_hosts(const std::vector<Rank>& ranks, const std::vector<Host>& described) {
  std::vector<Host> hosts;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto host = std::find_if(hosts.begin(), hosts.end(),
                             [&](const Host& one) { return one.id == ranks[i].host_id; });
    if (host == hosts.end()) host = hosts.insert(hosts.end(), described[i]);
    host->ranks.push_back(ranks[i].rank);
  }
  // A pinned rank knows only its own cores.
  for (Host& host : hosts) {
    std::set<int> cpus;
    for (const Rank& rank : ranks)
      if (rank.host_id == host.id) cpus.insert(rank.cpus.begin(), rank.cpus.end());
    host.num_cores = static_cast<int>(cpus.size());
    if (host.cpu_quota >= 0)
      host.num_cores = std::clamp(static_cast<int>(host.cpu_quota), 1, host.num_cores);
  }
  return hosts;
}

}  // namespace lockstep::cli::inspection
