// The one order in which values of several ranks are combined: ranks [0, n) split at the largest
// power of two below n, each half combined by the same rule, then the two halves. Every algorithm
// follows it, so the layout never changes a bit of a sum.
#pragma once

#include <functional>
#include <vector>

namespace lockstep::comm {

// Where the tree over n ≥ 2 ranks splits: the number of ranks in its left half.
constexpr int tree_split(int n) {
  int left = 1;
  while (left * 2 < n) left *= 2;
  return left;
}

// A node of the tree: the ranks [first, first + count).
struct TreeNode {
  int first = 0;
  int count = 0;
  bool operator==(const TreeNode&) const = default;
};

// The largest nodes of the tree over n ranks whose ranks all belong to a set: what that set can
// combine on its own without changing the order. In ascending order of ranks.
std::vector<TreeNode> largest_nodes_within(int n, const std::function<bool(int)>& in_set);

}  // namespace lockstep::comm
