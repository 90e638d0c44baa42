// The index arithmetic of a mesh: named axes over the ranks of a world. Plain numbers: no LibTorch,
// no communication.
#pragma once

#include <string>
#include <vector>

namespace lockstep::mesh {

struct Axis {
  std::string name;
  int size = 1;  // -1: whatever is left of the world; one axis at most

  bool operator==(const Axis&) const = default;
};

// The usual axes, slowest first: ranks that differ only in the last are neighbours, so what
// communicates most stands last.
struct ParallelSizes {
  int pp = 1;
  int dp_replicate = 1;
  int dp_shard = -1;
  int cp = 1;
  int tp = 1;

  std::vector<Axis> axes() const;
};

// Ranks in row-major order of the axes: the last axis changes fastest. A value; thread-safe.
// UsageError, with the axes there are, for a name or a number that makes no sense.
class MeshShape {
 public:
  // Fills in the axis of size -1. UsageError where the sizes do not multiply to `world_size`.
  MeshShape(std::vector<Axis> axes, int world_size);

  const std::vector<Axis>& axes() const { return axes_; }
  int world_size() const { return world_size_; }
  int size(const std::string& axis) const;
  // The size of the group that several axes span together.
  int group_size(const std::vector<std::string>& axes) const;

  std::vector<int> coordinates(int rank) const;  // one for each axis
  int coordinate(int rank, const std::string& axis) const;
  int rank_at(const std::vector<int>& coordinates) const;

  // The ranks that differ from `rank` only along the given axes, `rank` among them, ascending:
  // row-major in the mesh's order, in whichever order the axes are named.
  std::vector<int> group_of(int rank, const std::vector<std::string>& axes) const;
  // The number of the group along these axes that `rank` is in, from 0, and its position in it.
  int group_number(int rank, const std::vector<std::string>& axes) const;
  int position_in_group(int rank, const std::vector<std::string>& axes) const;

  // "tp[dp_shard=1]", "dp_shard*cp[pp=0,tp=3]": the axes, and where the group stands on the others
  // that have more than one position.
  std::string group_name(int rank, const std::vector<std::string>& axes) const;

  // "dp_shard 4 × tp 2"
  std::string text() const;

  // The names in the mesh's order, each checked to be an axis and named once.
  std::vector<std::string> in_mesh_order(const std::vector<std::string>& axes) const;

 private:
  std::size_t index_of(const std::string& axis) const;
  std::vector<bool> selection(const std::vector<std::string>& axes) const;
  void check_rank(int rank) const;

  std::vector<Axis> axes_;
  int world_size_;
};

}  // namespace lockstep::mesh
