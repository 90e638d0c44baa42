#include <lockstep/distributed/axis_groups.h>

namespace lockstep {

std::shared_ptr<comm::Communicator> group_along(mesh::DeviceMesh& mesh,
                                                const std::vector<std::string>& axes) {
  if (axes.empty()) return nullptr;
  return axes.size() == 1 ? mesh.axis(axes.front()) : mesh.flatten(axes);
}

}  // namespace lockstep
