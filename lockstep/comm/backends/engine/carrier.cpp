#include <lockstep/comm/backends/engine/carrier.h>

#include <limits>

#include <ATen/ATen.h>

namespace lockstep::comm::backends {

namespace {

bool is_half(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }
bool orders_floats(at::ScalarType type, ReduceOp op) {
  return at::isFloatingType(type) && (op == ReduceOp::min || op == ReduceOp::max);
}

// The bits of a float, read as a signed integer, are in order for positive numbers and in reverse
// for negative ones: flipping the latter's magnitude bits puts all of them in order, with positive
// NaNs above +inf and negative ones below -inf. The flip is its own inverse.
template <typename Integer>
at::Tensor flip_negative(const at::Tensor& bits) {
  const auto sign = bits.bitwise_right_shift(std::numeric_limits<Integer>::digits);
  return bits.bitwise_xor(sign.bitwise_and(std::numeric_limits<Integer>::max()));
}

at::Tensor flip(const at::Tensor& bits) {
  return bits.scalar_type() == at::kInt ? flip_negative<std::int32_t>(bits)
                                        : flip_negative<std::int64_t>(bits);
}

at::Tensor to_ordered(const at::Tensor& floats, BasicOp op) {
  const double quiet = std::numeric_limits<double>::quiet_NaN();
  // A NaN's sign is arbitrary: give it the sign with which it wins.
  auto canonical = floats.masked_fill(floats.isnan(), op == BasicOp::max ? quiet : -quiet);
  return flip(canonical.view(floats.scalar_type() == at::kFloat ? at::kInt : at::kLong));
}

at::Tensor from_ordered(const at::Tensor& ordered) {
  return flip(ordered).view(ordered.scalar_type() == at::kInt ? at::kFloat : at::kDouble);
}

}  // namespace

at::Tensor flat_alias(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(tensor.device());
  // An empty tensor has no memory to point at.
  if (tensor.numel() == 0) return at::empty({0}, options);
  return at::from_blob(
      tensor.data_ptr(), {tensor.numel()}, [tensor](void*) {}, options);
}

at::Tensor byte_alias(const at::Tensor& tensor) { return flat_alias(tensor).view(at::kByte); }

Carrier carry(const std::vector<at::Tensor>& tensors, ReduceOp op) {
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) flat.push_back(flat_alias(tensor));
  at::Tensor whole = flat.size() == 1 ? flat.front() : at::cat(flat);
  const at::ScalarType type = whole.scalar_type();

  Carrier carrier;
  carrier.op = op == ReduceOp::min   ? BasicOp::min
               : op == ReduceOp::max ? BasicOp::max
                                     : BasicOp::sum;
  if (type == at::kBool) {
    if (carrier.op == BasicOp::sum) carrier.op = BasicOp::max;
    carrier.tensor = whole.view(at::kByte);
    return carrier;
  }
  if (is_half(type)) whole = whole.to(at::kFloat);
  carrier.tensor = orders_floats(type, op) ? to_ordered(whole, carrier.op) : whole;
  return carrier;
}

void restore(const Carrier& reduced, ReduceOp op, double divisor,
             const std::vector<at::Tensor>& tensors) {
  at::Tensor whole = reduced.tensor;
  const at::ScalarType type = tensors.front().scalar_type();
  if (orders_floats(type, op)) whole = from_ordered(whole);
  if (op == ReduceOp::mean) whole.div_(divisor);
  if (type == at::kBool) whole = whole.view(at::kBool);

  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    const std::int64_t length = tensor.numel();
    const at::Tensor target = flat_alias(tensor);
    if (length > 0 && target.data_ptr() != whole.data_ptr())
      target.copy_(whole.narrow(0, at, length));
    at += length;
  }
}

void reduce_locally(const std::vector<at::Tensor>& parts, ReduceOp op, double divisor,
                    const at::Tensor& output) {
  const at::ScalarType type = output.scalar_type();
  const bool half = is_half(type);
  at::Tensor result = half ? parts.front().to(at::kFloat) : parts.front().clone();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const at::Tensor part = half ? parts[i].to(at::kFloat) : parts[i];
    switch (op) {
      case ReduceOp::sum:
      case ReduceOp::mean:
        if (type == at::kBool)
          result.logical_or_(part);
        else
          result.add_(part);
        break;
      case ReduceOp::min: result = at::minimum(result, part); break;
      case ReduceOp::max: result = at::maximum(result, part); break;
    }
  }
  if (op == ReduceOp::mean) result.div_(divisor);
  flat_alias(output).copy_(result);
}

}  // namespace lockstep::comm::backends
