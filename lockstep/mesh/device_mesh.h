// Named axes over the ranks of a world, and a Communicator for each.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <lockstep/comm/communicator.h>
#include <lockstep/mesh/placement/mesh_shape.h>

namespace lockstep::mesh {

struct MeshOptions {
  // Joint groups that the constructor makes, so that flatten() of these does not communicate later.
  std::vector<std::vector<std::string>> flatten;
};

// Every rank of the world makes the same mesh, at the same point of its program: the constructor
// splits the world once for each axis, in order, and then for each joint group of the options.
// After that axis() and the flatten() of those groups never communicate, so ranks may ask for
// different ones, or some may not ask at all.
//
// Each group is a Communicator of its own, also where two have the same ranks (an axis of size 1
// flattened with another, or one that spans the world): calls on one never mix with another's.
//
// Ownership: shares the world and the groups. Threading: as Communicator, one thread at a time.
// Failure: UsageError for axes that make no sense, before anything is sent; CommError from splits.
class DeviceMesh {
 public:
  DeviceMesh(std::shared_ptr<comm::Communicator> world, std::vector<Axis> axes,
             MeshOptions options = {});

  const MeshShape& shape() const { return shape_; }
  const std::shared_ptr<comm::Communicator>& world() const { return world_; }
  // Grows when an elastic job re-forms its world: a mesh of an older one is of no more use.
  std::uint32_t generation() const { return world_->generation(); }

  // The ranks that differ from this one only along this axis. UsageError, with the axes there are,
  // for another name.
  const std::shared_ptr<comm::Communicator>& axis(const std::string& name) const;

  // The ranks that differ from this one along these axes only, in the mesh's order whichever way
  // they are named. A group that the options did not ask for is made when first asked for; that is
  // a split, so every rank of the world must ask for it at the same point. Ranks that do not are
  // named in the CommError of those that do, at the world's timeout.
  const std::shared_ptr<comm::Communicator>& flatten(const std::vector<std::string>& names);

  // This rank's place.
  int rank() const { return world_->rank(); }
  std::vector<int> coordinates() const { return shape_.coordinates(rank()); }
  int coordinate(const std::string& axis) const { return shape_.coordinate(rank(), axis); }
  int size(const std::string& axis) const { return shape_.size(axis); }

  // The world's ranks in this rank's group along an axis, or several, in the group's order.
  std::vector<int> ranks_of(const std::string& axis) const {
    return shape_.group_of(rank(), {axis});
  }
  std::vector<int> ranks_of_joint(const std::vector<std::string>& axes) const {
    return shape_.group_of(rank(), axes);
  }

 private:
  using Names = std::vector<std::string>;  // in the mesh's order

  std::shared_ptr<comm::Communicator> make_group(const Names& names);

  std::shared_ptr<comm::Communicator> world_;
  MeshShape shape_;
  std::map<Names, std::shared_ptr<comm::Communicator>> groups_;
};

}  // namespace lockstep::mesh
