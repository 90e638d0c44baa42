#include <lockstep/comm/algorithms/reduction.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include <lockstep/base/error.h>
#include <lockstep/base/float16.h>

namespace lockstep::comm {

namespace {

// True if every rank of the node is in the set; if not, appends the node's largest sub-nodes whose
// ranks all are.
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

namespace {

// Elements handled at a time, few enough for intermediate results to stay in the first-level cache.
constexpr std::size_t kBlock = 1024;

struct Bool {
  std::uint8_t value;
};

template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<Float16> {
  using type = float;
};
template <>
struct AccumulatorOf<BFloat16> {
  using type = float;
};

inline void store(float value, Float16& out) { out = to_float16(value); }
inline void store(float value, BFloat16& out) { out = to_bfloat16(value); }
inline float load(Float16 value) { return to_float(value); }
inline float load(BFloat16 value) { return to_float(value); }

struct Sum {
  template <typename A>
  static A apply(A left, A right) {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;  // wraps on overflow, as torch's integers do
      return static_cast<A>(static_cast<U>(left) + static_cast<U>(right));
    } else {
      return left + right;
    }
  }
  static Bool apply(Bool left, Bool right) {
    return {static_cast<std::uint8_t>((left.value | right.value) != 0)};
  }
};

struct Min {
  template <typename A>
  static A apply(A left, A right) {
    if constexpr (std::is_floating_point_v<A>) {
      return (right < left || right != right) && left == left ? right : left;
    } else {
      return right < left ? right : left;
    }
  }
  static Bool apply(Bool left, Bool right) {
    return {static_cast<std::uint8_t>(left.value != 0 && right.value != 0)};
  }
};

struct Max {
  template <typename A>
  static A apply(A left, A right) {
    if constexpr (std::is_floating_point_v<A>) {
      return (right > left || right != right) && left == left ? right : left;
    } else {
      return right > left ? right : left;
    }
  }
  static Bool apply(Bool left, Bool right) { return Sum::apply(left, right); }
};

template <typename A, typename Op>
void combine_block(const A* left, const A* right, A* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) out[i] = Op::apply(left[i], right[i]);
}

// Evaluates the tree for one block of elements at a time.
template <typename T, typename Op>
class Evaluator {
 public:
  using A = typename AccumulatorOf<T>::type;

  explicit Evaluator(std::span<const Operand> operands) : operands_(operands) {}

  // Returns the values of a node for elements [at, at + count), in `buffer` or where they already
  // lie.
  const A* evaluate(TreeNode node, std::size_t& next, std::size_t at, std::size_t count,
                    A* buffer) const {
    const Operand& operand = operands_[next];
    if (operand.node == node) {
      ++next;
      if (operand.partial) return reinterpret_cast<const A*>(operand.data) + at;
      const T* values = reinterpret_cast<const T*>(operand.data) + at;
      if constexpr (std::is_same_v<T, A>) {
        return values;
      } else {
        for (std::size_t i = 0; i < count; ++i) buffer[i] = load(values[i]);
        return buffer;
      }
    }
    LOCKSTEP_CHECK(node.count > 1, "no operand for rank {}", node.first);
    const int split = tree_split(node.count);
    A right_buffer[kBlock];
    const A* left = evaluate({node.first, split}, next, at, count, buffer);
    const A* right =
        evaluate({node.first + split, node.count - split}, next, at, count, right_buffer);
    combine_block<A, Op>(left, right, buffer, count);
    return buffer;
  }

  void to_partial(TreeNode root, A* destination, std::size_t count) const {
    A buffer[kBlock];
    for (std::size_t at = 0; at < count; at += kBlock) {
      const std::size_t size = std::min(kBlock, count - at);
      std::size_t next = 0;
      const A* values = evaluate(root, next, at, size, buffer);
      std::memmove(destination + at, values, size * sizeof(A));
    }
  }

  void to_result(int num_ranks, double divisor, std::span<std::byte* const> destinations,
                 std::size_t count) const {
    A buffer[kBlock];
    T* first = reinterpret_cast<T*>(destinations.front());
    for (std::size_t at = 0; at < count; at += kBlock) {
      const std::size_t size = std::min(kBlock, count - at);
      if (std::is_same_v<T, A> && operands_.size() == 2 && divisor == 1) {
        // In the common case of two ranks' own values no buffer is needed.
        combine_block<A, Op>(reinterpret_cast<const A*>(operands_[0].data) + at,
                             reinterpret_cast<const A*>(operands_[1].data) + at,
                             reinterpret_cast<A*>(first) + at, size);
      } else {
        std::size_t next = 0;
        const A* values = evaluate({0, num_ranks}, next, at, size, buffer);
        finish_block(divisor, values, first + at, size);
      }
      for (std::byte* other : destinations.subspan(1))
        std::memcpy(reinterpret_cast<T*>(other) + at, first + at, size * sizeof(T));
    }
  }

  static void finish_block(double divisor, const A* values, T* out, std::size_t count) {
    if constexpr (std::is_same_v<T, A>) {
      if constexpr (std::is_floating_point_v<A>) {
        if (divisor != 1) {
          const A by = static_cast<A>(divisor);
          for (std::size_t i = 0; i < count; ++i) out[i] = values[i] / by;
          return;
        }
      }
      if (count > 0) std::memmove(out, values, count * sizeof(T));
    } else {
      const A by = static_cast<A>(divisor);
      for (std::size_t i = 0; i < count; ++i) store(values[i] / by, out[i]);
    }
  }

 private:
  std::span<const Operand> operands_;
};

template <typename Visitor>
void visit_op(ReduceOp op, Visitor visitor) {
  switch (op) {
    case ReduceOp::sum:
    case ReduceOp::mean: return visitor(Sum{});
    case ReduceOp::min: return visitor(Min{});
    case ReduceOp::max: return visitor(Max{});
  }
}

// Calls visitor(T{}, Op{}) for the reduction's types.
template <typename Visitor>
void visit(const Reduction& reduction, Visitor visitor) {
  const auto with = [&](auto value) {
    visit_op(reduction.op, [&](auto op) { visitor(value, op); });
  };
  switch (reduction.dtype) {
    case DType::float32: return with(float{});
    case DType::float64: return with(double{});
    case DType::float16: return with(Float16{});
    case DType::bfloat16: return with(BFloat16{});
    case DType::int32: return with(std::int32_t{});
    case DType::int64: return with(std::int64_t{});
    case DType::uint8: return with(std::uint8_t{});
    case DType::boolean: return with(Bool{});
  }
  LOCKSTEP_CHECK(false, "dtype {}", static_cast<int>(reduction.dtype));
}

}  // namespace

void reduce_to_partial(const Reduction& reduction, TreeNode root, std::span<const Operand> operands,
                       std::byte* destination, std::size_t count) {
  visit(reduction, [&]<typename T, typename Op>(T, Op) {
    using A = typename AccumulatorOf<T>::type;
    Evaluator<T, Op>(operands).to_partial(root, reinterpret_cast<A*>(destination), count);
  });
}

void reduce_to_result(const Reduction& reduction, int num_ranks, std::span<const Operand> operands,
                      std::span<std::byte* const> destinations, std::size_t count) {
  visit(reduction, [&]<typename T, typename Op>(T, Op) {
    Evaluator<T, Op>(operands).to_result(num_ranks, reduction.divisor, destinations, count);
  });
}

void combine(const Reduction& reduction, const std::byte* left, const std::byte* right,
             std::byte* accumulated, std::size_t count) {
  visit(reduction, [&]<typename T, typename Op>(T, Op) {
    using A = typename AccumulatorOf<T>::type;
    combine_block<A, Op>(reinterpret_cast<const A*>(left), reinterpret_cast<const A*>(right),
                         reinterpret_cast<A*>(accumulated), count);
  });
}

void widen(const Reduction& reduction, const std::byte* values, std::byte* partial,
           std::size_t count) {
  const Operand operand{{0, 1}, values, false};
  reduce_to_partial(reduction, {0, 1}, std::span(&operand, 1), partial, count);
}

void finish(const Reduction& reduction, const std::byte* partial, std::byte* result,
            std::size_t count) {
  visit(reduction, [&]<typename T, typename Op>(T, Op) {
    using A = typename AccumulatorOf<T>::type;
    Evaluator<T, Op>::finish_block(reduction.divisor, reinterpret_cast<const A*>(partial),
                                   reinterpret_cast<T*>(result), count);
  });
}

}  // namespace lockstep::comm
