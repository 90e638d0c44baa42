// Element-wise reductions on memory, in the canonical order.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include <lockstep/comm/operations/operation.h>

namespace lockstep::comm {

// The one order in which values of several ranks are combined: ranks [0, n) split at the largest
// power of two below n, each half combined by the same rule, then the two halves. Every algorithm
// follows it, so the layout never changes a bit of a sum.

// The number of ranks in the left half of the tree over n ≥ 2 ranks.
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

// The largest nodes of the tree over n ranks whose ranks all belong to a set, in ascending order of
// ranks: the set can combine these on its own without changing the order.
std::vector<TreeNode> largest_nodes_within(int n, const std::function<bool(int)>& in_set);

// Says what to combine and how. 16-bit floats are accumulated in float and rounded once at the end;
// other types accumulate in themselves.
struct Reduction {
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  double divisor = 1;  // the finished sum is divided by this, for a mean

  std::size_t element_bytes() const { return size_of(dtype); }
  // The type of a partial result.
  DType accumulator() const {
    return dtype == DType::float16 || dtype == DType::bfloat16 ? DType::float32 : dtype;
  }
  std::size_t accumulator_bytes() const { return size_of(accumulator()); }
};

// A value to combine: a rank's own values, or the partial result of a node of the tree in the
// accumulator's type.
struct Operand {
  TreeNode node;
  const std::byte* data = nullptr;
  bool partial = false;
};

// destination ← the values of `root`, combined by the tree from operands that tile its ranks in
// ascending order by nodes of the tree. Writes a partial result (accumulator type).
void reduce_to_partial(const Reduction& reduction, TreeNode root, std::span<const Operand> operands,
                       std::byte* destination, std::size_t count);

// The same over all `num_ranks` ranks, finished: divided for a mean, rounded to the reduction's own
// type, and written to every destination. A destination may be an operand's memory, element for
// element.
void reduce_to_result(const Reduction& reduction, int num_ranks, std::span<const Operand> operands,
                      std::span<std::byte* const> destinations, std::size_t count);

// accumulated ← left ∘ right. All are partial results, and `accumulated` may be one of the other
// two.
void combine(const Reduction& reduction, const std::byte* left, const std::byte* right,
             std::byte* accumulated, std::size_t count);

// widen() turns a rank's own values into a partial result; finish() turns a partial result over all
// ranks into the result.
void widen(const Reduction& reduction, const std::byte* values, std::byte* partial,
           std::size_t count);
void finish(const Reduction& reduction, const std::byte* partial, std::byte* result,
            std::size_t count);

}  // namespace lockstep::comm
