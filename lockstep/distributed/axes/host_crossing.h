// Axes that reach over several hosts. No LibTorch: launchers say it, too.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <lockstep/mesh/placement/mesh_shape.h>

namespace lockstep {

struct HostCrossing {
  std::vector<int> ranks;  // of the first group along the axis that is on several hosts
  std::vector<int> hosts;  // of these ranks
  int num_groups = 0;      // that are
  int inside = 1;          // the largest part of the axis that every host has whole groups of
};

// `host_of_rank` has a number for each rank of the world. Nothing where each group of the axis is
// on one host.
std::optional<HostCrossing> host_crossing(const mesh::MeshShape& shape, const std::string& axis,
                                          const std::vector<int>& host_of_rank);

// "ranks 0, 1 of host 0 with 2, 3 of host 1"
std::string to_text(const HostCrossing& crossing);

}  // namespace lockstep
