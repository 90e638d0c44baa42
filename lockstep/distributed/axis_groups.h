// The groups of ranks along a job's axes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <lockstep/mesh/device_mesh.h>

namespace lockstep {

// The ranks along one or several axes; null along none.
std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes);

}  // namespace lockstep
