// The mesh that a config asks for, and what its axes are for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/distributed/config.h>
#include <lockstep/mesh/device_mesh.h>

namespace lockstep {

struct JobAxes {
  std::vector<mesh::Axis> axes;        // of the mesh, slowest first
  std::vector<std::string> samples;    // along which ranks have samples of their own
  std::vector<std::string> gradients;  // along which they are summed: where samples, or parts of
                                       // them, differ
  std::vector<std::string> shards;     // of those, along which a strategy cuts the model
  std::vector<std::string> model;      // along which ranks have other parts of the model; or none
};

// UsageError, with the numbers, where the config's strategy needs an axis that it does not have, or
// has one that it cannot use.
JobAxes axes_for(const DistributedConfig& config, int local_world_size);

// Those of its groups that are of several axes.
std::vector<std::vector<std::string>> joint_groups(const JobAxes& axes);

// The ranks along one or several axes; null along none.
std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes);

}  // namespace lockstep
