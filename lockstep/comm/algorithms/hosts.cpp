#include <lockstep/comm/algorithms/hosts.h>

#include <algorithm>

namespace lockstep::comm {

Hosts::Hosts(const Transport& transport) {
  const Topology& topology = transport.topology();
  own = topology.host_of[static_cast<std::size_t>(transport.rank())];
  for (int host = 0; host < topology.num_hosts(); ++host) {
    ranks.push_back(topology.ranks_on(host));
    partials.push_back(largest_nodes_within(transport.size(), [&](int rank) {
      return topology.host_of[static_cast<std::size_t>(rank)] == host;
    }));
  }
  const auto& here = local();
  local_index_ = static_cast<std::size_t>(std::find(here.begin(), here.end(), transport.rank()) -
                                          here.begin());
}

std::size_t Hosts::fewest() const {
  std::size_t least = ranks.front().size();
  for (const auto& here : ranks) least = std::min(least, here.size());
  return least;
}

void Hosts::combine_local(const Reduction& reduction, const std::vector<const std::byte*>& values,
                          std::byte* out, std::size_t stride, std::size_t count) const {
  std::size_t next = 0;
  for (const TreeNode& node : partials[static_cast<std::size_t>(own)]) {
    // The nodes tile this host's ranks in order, so their ranks are consecutive in local().
    std::vector<Operand> operands;
    for (int i = 0; i < node.count; ++i)
      operands.push_back({{node.first + i, 1}, values[next++], false});
    reduce_to_partial(reduction, node, operands, out, count);
    out += stride;
  }
}

std::vector<Operand> Hosts::operands(const Reduction& reduction,
                                     const std::vector<const std::byte*>& parts,
                                     std::size_t count) const {
  std::vector<Operand> all;
  for (std::size_t host = 0; host < ranks.size(); ++host)
    for (std::size_t i = 0; i < partials[host].size(); ++i)
      all.push_back(
          {partials[host][i], parts[host] + i * count * reduction.accumulator_bytes(), true});
  std::sort(all.begin(), all.end(),
            [](const Operand& a, const Operand& b) { return a.node.first < b.node.first; });
  return all;
}

}  // namespace lockstep::comm
