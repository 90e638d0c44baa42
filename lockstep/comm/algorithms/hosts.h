// What the hierarchical algorithms know about where ranks are.
#pragma once

#include <vector>

#include <lockstep/comm/algorithms/reduce_kernel.h>
#include <lockstep/comm/transport/transport.h>

namespace lockstep::comm {

struct Hosts {
  explicit Hosts(const Transport& transport);

  int own = 0;                                  // this rank's host
  std::vector<std::vector<int>> ranks;          // of each host, ascending
  std::vector<std::vector<TreeNode>> partials;  // the nodes of the tree each host can combine alone

  std::size_t count() const { return ranks.size(); }
  const std::vector<int>& local() const { return ranks[static_cast<std::size_t>(own)]; }
  std::size_t local_index() const { return local_index_; }
  // Ranks on the host with the fewest.
  std::size_t fewest() const;

  // For one element range: combines what this host's ranks contribute (`values`, in the order of
  // local()) into its partial results, each `stride` bytes after the one before.
  void combine_local(const Reduction& reduction, const std::vector<const std::byte*>& values,
                     std::byte* out, std::size_t stride, std::size_t count) const;

  // All hosts' partial results as operands of the whole tree; parts[h] holds those of host h, one
  // after the other.
  std::vector<Operand> operands(const Reduction& reduction,
                                const std::vector<const std::byte*>& parts,
                                std::size_t count) const;

 private:
  std::size_t local_index_ = 0;
};

}  // namespace lockstep::comm
