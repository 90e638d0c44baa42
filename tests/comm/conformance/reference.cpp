#include "reference.h"

#include <bit>
#include <cmath>
#include <type_traits>

#include <ATen/ATen.h>

namespace lockstep::comm::conformance {

const std::vector<at::ScalarType> kDTypes = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,
                                             at::kInt,   at::kLong,   at::kByte, at::kBool};
const std::vector<ReduceOp> kReductions = {ReduceOp::sum, ReduceOp::mean, ReduceOp::min,
                                           ReduceOp::max};

namespace {

std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A number in ±[2^-8, 2^7): sums of a few of them fit into half precision.
double scattered(std::uint64_t bits) {
  const std::uint64_t sign = (bits & 1) ^ 1;
  const std::uint64_t exponent = 1023 - 8 + (bits >> 1) % 15;
  return std::bit_cast<double>(sign << 63 | exponent << 52 | bits >> 12);
}

template <typename T>
void fill(at::Tensor& tensor, std::uint64_t seed) {
  auto* out = static_cast<T*>(tensor.data_ptr());
  const std::int64_t count = tensor.numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t bits = mixed(seed * 0x10001u + static_cast<std::uint64_t>(i));
    if constexpr (std::is_same_v<T, bool>) {
      out[i] = bits % 4 == 0;
    } else if constexpr (std::is_integral_v<T>) {
      out[i] = static_cast<T>(bits);
    } else if constexpr (std::is_same_v<T, double>) {
      out[i] = scattered(bits);
    } else {
      out[i] = static_cast<T>(static_cast<float>(scattered(bits)));
    }
  }
}

// The type that is added in: unsigned integers, which wrap, and 32-bit floats for 16-bit ones.
template <typename T>
struct Wide {
  using type = T;
};
template <>
struct Wide<at::Half> {
  using type = float;
};
template <>
struct Wide<at::BFloat16> {
  using type = float;
};

template <typename A>
A combined(A a, A b, ReduceOp op) {
  if constexpr (std::is_same_v<A, bool>) {
    return op == ReduceOp::min ? a && b : a || b;
  } else {
    if constexpr (std::is_floating_point_v<A>) {
      if (op != ReduceOp::sum && op != ReduceOp::mean && (std::isnan(a) || std::isnan(b)))
        return std::isnan(a) ? a : b;
    }
    switch (op) {
      case ReduceOp::min: return b < a ? b : a;
      case ReduceOp::max: return a < b ? b : a;
      default: break;
    }
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return a + b;
    }
  }
}

template <typename T, typename A = typename Wide<T>::type>
std::vector<A> tree(const std::vector<at::Tensor>& inputs, std::size_t first, std::size_t n,
                    ReduceOp op) {
  if (n == 1) {
    const auto* data = static_cast<const T*>(inputs[first].data_ptr());
    return std::vector<A>(data, data + inputs[first].numel());
  }
  std::size_t left = 1;
  while (left * 2 < n) left *= 2;
  std::vector<A> result = tree<T>(inputs, first, left, op);
  const std::vector<A> right = tree<T>(inputs, first + left, n - left, op);
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = combined<A>(result[i], right[i], op);
  return result;
}

template <typename T>
void canonical_into(at::Tensor& result, const std::vector<at::Tensor>& inputs, ReduceOp op) {
  auto* out = static_cast<T*>(result.data_ptr());
  for (auto value : tree<T>(inputs, 0, inputs.size(), op)) {
    if constexpr (!std::is_integral_v<T>)
      if (op == ReduceOp::mean) value = value / static_cast<decltype(value)>(inputs.size());
    *out++ = static_cast<T>(value);
  }
}

// Calls `visit` with a value of the C++ type of a dtype.
template <typename Visit>
void with_type(at::ScalarType dtype, Visit visit) {
  switch (dtype) {
    case at::kFloat: return visit(float{});
    case at::kDouble: return visit(double{});
    case at::kHalf: return visit(at::Half{});
    case at::kBFloat16: return visit(at::BFloat16{});
    case at::kInt: return visit(std::int32_t{});
    case at::kLong: return visit(std::int64_t{});
    case at::kByte: return visit(std::uint8_t{});
    default: return visit(bool{});
  }
}

}  // namespace

bool defined(ReduceOp op, at::ScalarType dtype) {
  return op != ReduceOp::mean || at::isFloatingType(dtype);
}

at::Tensor values(at::ScalarType dtype, std::int64_t count, std::uint64_t seed) {
  at::Tensor tensor = at::empty({count}, at::TensorOptions().dtype(dtype));
  with_type(dtype, [&](auto type) { fill<decltype(type)>(tensor, seed); });
  return tensor;
}

at::Tensor canonical(const std::vector<at::Tensor>& inputs, ReduceOp op) {
  at::Tensor result = at::empty_like(inputs.front());
  with_type(result.scalar_type(),
            [&](auto type) { canonical_into<decltype(type)>(result, inputs, op); });
  return result;
}

bool within_rounding(const at::Tensor& got, const at::Tensor& wanted,
                     const std::vector<at::Tensor>& inputs, ReduceOp op) {
  const bool rounds =
      at::isFloatingType(wanted.scalar_type()) && (op == ReduceOp::sum || op == ReduceOp::mean);
  const at::Tensor mine = got.to(at::kCPU);
  if (!rounds) return at::allclose(mine.to(at::kDouble), wanted.to(at::kDouble), 0, 0, true);
  double epsilon = 0;
  switch (wanted.scalar_type()) {
    case at::kDouble: epsilon = 0x1p-52; break;
    case at::kFloat: epsilon = 0x1p-23; break;
    case at::kHalf: epsilon = 0x1p-10; break;
    default: epsilon = 0x1p-7; break;
  }
  at::Tensor magnitude = at::zeros_like(wanted, at::kDouble);
  for (const at::Tensor& input : inputs) magnitude += input.to(at::kDouble).abs();
  if (op == ReduceOp::mean) magnitude /= static_cast<double>(inputs.size());
  const at::Tensor allowed = magnitude * (epsilon * static_cast<double>(inputs.size()));
  const at::Tensor off = (mine.to(at::kDouble) - wanted.to(at::kDouble)).abs();
  const at::Tensor same = mine.eq(wanted).logical_or(mine.isnan().logical_and(wanted.isnan()));
  return off.le(allowed).logical_or(same).all().item<bool>();
}

}  // namespace lockstep::comm::conformance
