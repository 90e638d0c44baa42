#include <lockstep/mesh/device_mesh.h>

#include <lockstep/base/error.h>
#include <lockstep/base/hash.h>

namespace lockstep::mesh {

namespace {

int size_of(const std::shared_ptr<comm::Communicator>& world) {
  if (world == nullptr) throw UsageError("a mesh needs a world: the communicator given is null");
  return world->size();
}

// Groups' names are short; axes may have names of any length.
std::string fitting(const std::string& name) {
  constexpr std::size_t kLongest = 128;
  if (name.size() <= kLongest) return name;
  const std::string hash = fmt::format("~{:016x}", hash_text(name));
  return name.substr(0, kLongest - hash.size()) + hash;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<comm::Communicator> world, std::vector<Axis> axes,
                       MeshOptions options)
    : world_(std::move(world)), shape_(std::move(axes), size_of(world_)) {
  // All checks come before the first split: a mistake in the last group must not leave some behind.
  std::vector<Names> wanted;
  for (const Axis& axis : shape_.axes()) wanted.push_back({axis.name});
  for (const auto& names : options.flatten) wanted.push_back(shape_.in_mesh_order(names));
  for (const Names& names : wanted)
    if (!groups_.contains(names)) groups_[names] = make_group(names);
}

std::shared_ptr<comm::Communicator> DeviceMesh::make_group(const Names& names) {
  return world_->split(shape_.group_number(rank(), names), shape_.position_in_group(rank(), names),
                       fitting(shape_.group_name(rank(), names)));
}

const std::shared_ptr<comm::Communicator>& DeviceMesh::axis(const std::string& name) const {
  return groups_.at(shape_.in_mesh_order({name}));
}

const std::shared_ptr<comm::Communicator>& DeviceMesh::flatten(
    const std::vector<std::string>& names) {
  const Names ordered = shape_.in_mesh_order(names);
  const auto found = groups_.find(ordered);
  if (found != groups_.end()) return found->second;
  // Kept only once it is there: after a failed split the next try must split again.
  auto group = make_group(ordered);
  return groups_.emplace(ordered, std::move(group)).first->second;
}

}  // namespace lockstep::mesh
