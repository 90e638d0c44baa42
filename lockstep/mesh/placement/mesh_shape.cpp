#include <lockstep/mesh/placement/mesh_shape.h>

#include <algorithm>
#include <cstdint>

#include <spdlog/fmt/ranges.h>

#include <lockstep/base/error.h>

namespace lockstep::mesh {

namespace {

std::string product_text(const std::vector<Axis>& axes) {
  std::string text;
  for (const Axis& axis : axes)
    text += fmt::format("{}{} {}", text.empty() ? "" : " × ", axis.name, axis.size);
  return text.empty() ? "no axes" : text;
}

bool plain_name(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  });
}

void check_axes(const std::vector<Axis>& axes) {
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (!plain_name(axes[i].name))
      throw UsageError("'{}' is no name for an axis: use letters, digits and '_'", axes[i].name);
    if (axes[i].size < 1 && axes[i].size != -1)
      throw UsageError("axis '{}' has size {}: it must be at least 1, or -1 to be filled in",
                       axes[i].name, axes[i].size);
    for (std::size_t j = 0; j < i; ++j) {
      if (axes[j].name == axes[i].name)
        throw UsageError("axis '{}' is named twice ({})", axes[i].name, product_text(axes));
      if (axes[j].size == -1 && axes[i].size == -1)
        throw UsageError("axes '{}' and '{}' are both -1: only one can be filled in", axes[j].name,
                         axes[i].name);
    }
  }
}

}  // namespace

std::vector<Axis> ParallelSizes::axes() const {
  return {
      {"pp", pp}, {"dp_replicate", dp_replicate}, {"dp_shard", dp_shard}, {"cp", cp}, {"tp", tp}};
}

MeshShape::MeshShape(std::vector<Axis> axes, int world_size)
    : axes_(std::move(axes)), world_size_(world_size) {
  if (world_size_ < 1) throw UsageError("a world of {} ranks has no mesh", world_size_);
  check_axes(axes_);
  std::vector<Axis> given;
  std::int64_t product = 1;
  for (const Axis& axis : axes_) {
    if (axis.size == -1) continue;
    given.push_back(axis);
    // Far beyond any world already; going on would only overflow.
    if (product <= INT32_MAX) product *= axis.size;
  }
  const auto open =
      std::find_if(axes_.begin(), axes_.end(), [](const Axis& a) { return a.size == -1; });
  const char* ranks = world_size_ == 1 ? "rank" : "ranks";
  if (open != axes_.end()) {
    if (product > world_size_ || world_size_ % product != 0)
      throw UsageError("{} = {} does not divide the world's {} {}, so axis '{}' (-1) cannot be "
                       "filled in: choose sizes whose product divides {}, or start another number "
                       "of ranks",
                       product_text(given), product, world_size_, ranks, open->name, world_size_);
    open->size = static_cast<int>(world_size_ / product);
  } else if (product != world_size_) {
    throw UsageError("{} = {} but the world has {} {}: change an axis, set one to -1 to have it "
                     "filled in, or start {} ranks",
                     product_text(given), product, world_size_, ranks, product);
  }
}

std::size_t MeshShape::index_of(const std::string& axis) const {
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (axes_[i].name == axis) return i;
  throw UsageError("the mesh has no axis '{}': it has {}", axis, text());
}

void MeshShape::check_rank(int rank) const {
  if (rank < 0 || rank >= world_size_)
    throw UsageError("rank {} of a mesh of {} ranks ({})", rank, world_size_, text());
}

std::vector<bool> MeshShape::selection(const std::vector<std::string>& axes) const {
  if (axes.empty()) throw UsageError("no axis was named: the mesh has {}", text());
  std::vector<bool> selected(axes_.size(), false);
  for (const std::string& axis : axes) {
    const std::size_t index = index_of(axis);
    if (selected[index]) throw UsageError("axis '{}' is named twice", axis);
    selected[index] = true;
  }
  return selected;
}

std::vector<std::string> MeshShape::in_mesh_order(const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  std::vector<std::string> names;
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (selected[i]) names.push_back(axes_[i].name);
  return names;
}

int MeshShape::size(const std::string& axis) const { return axes_[index_of(axis)].size; }

int MeshShape::group_size(const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  int size = 1;
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (selected[i]) size *= axes_[i].size;
  return size;
}

std::vector<int> MeshShape::coordinates(int rank) const {
  check_rank(rank);
  std::vector<int> result(axes_.size());
  for (std::size_t i = axes_.size(); i-- > 0; rank /= axes_[i].size)
    result[i] = rank % axes_[i].size;
  return result;
}

int MeshShape::coordinate(int rank, const std::string& axis) const {
  return coordinates(rank)[index_of(axis)];
}

int MeshShape::rank_at(const std::vector<int>& coordinates) const {
  if (coordinates.size() != axes_.size())
    throw UsageError("{} coordinates for a mesh of {} axes ({})", coordinates.size(), axes_.size(),
                     text());
  int rank = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i) {
    if (coordinates[i] < 0 || coordinates[i] >= axes_[i].size)
      throw UsageError("position {} on axis '{}', which has {}", coordinates[i], axes_[i].name,
                       axes_[i].size);
    rank = rank * axes_[i].size + coordinates[i];
  }
  return rank;
}

std::vector<int> MeshShape::group_of(int rank, const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  const int num_ranks = group_size(axes);
  const std::vector<int> mine = coordinates(rank);
  std::vector<int> group;
  for (int position = 0; position < num_ranks; ++position) {
    std::vector<int> at = mine;
    int rest = position;
    for (std::size_t i = axes_.size(); i-- > 0;) {
      if (!selected[i]) continue;
      at[i] = rest % axes_[i].size;
      rest /= axes_[i].size;
    }
    group.push_back(rank_at(at));
  }
  return group;
}

int MeshShape::group_number(int rank, const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  const std::vector<int> at = coordinates(rank);
  int number = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (!selected[i]) number = number * axes_[i].size + at[i];
  return number;
}

int MeshShape::position_in_group(int rank, const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  const std::vector<int> at = coordinates(rank);
  int position = 0;
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (selected[i]) position = position * axes_[i].size + at[i];
  return position;
}

std::string MeshShape::group_name(int rank, const std::vector<std::string>& axes) const {
  const std::vector<bool> selected = selection(axes);
  const std::vector<int> at = coordinates(rank);
  std::string where;
  for (std::size_t i = 0; i < axes_.size(); ++i)
    if (!selected[i] && axes_[i].size > 1)
      where += fmt::format("{}{}={}", where.empty() ? "" : ",", axes_[i].name, at[i]);
  const std::string name = fmt::format("{}", fmt::join(in_mesh_order(axes), "*"));
  return where.empty() ? name : fmt::format("{}[{}]", name, where);
}

std::string MeshShape::text() const { return product_text(axes_); }

}  // namespace lockstep::mesh
