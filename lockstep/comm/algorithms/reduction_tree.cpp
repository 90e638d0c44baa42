#include <lockstep/comm/algorithms/reduction_tree.h>

namespace lockstep::comm {

namespace {

// True where every rank of the node is in the set; if not, its largest such sub-nodes are appended.
bool collect(TreeNode node, const std::function<bool(int)>& in_set, std::vector<TreeNode>& found) {
  if (node.count == 1) return in_set(node.first);
  const int left = tree_split(node.count);
  const TreeNode low{node.first, left};
  const TreeNode high{node.first + left, node.count - left};
  const std::size_t before = found.size();
  const bool low_whole = collect(low, in_set, found);
  const bool high_whole = collect(high, in_set, found);
  if (low_whole && high_whole) return true;
  if (low_whole) found.insert(found.begin() + static_cast<std::ptrdiff_t>(before), low);
  if (high_whole) found.push_back(high);
  return false;
}

}  // namespace

std::vector<TreeNode> largest_nodes_within(int n, const std::function<bool(int)>& in_set) {
  std::vector<TreeNode> found;
  const TreeNode root{0, n};
  if (n > 0 && collect(root, in_set, found)) found.push_back(root);
  return found;
}

}  // namespace lockstep::comm
