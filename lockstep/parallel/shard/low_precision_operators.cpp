#include <lockstep/parallel/shard/low_precision_operators.h>

#include <algorithm>

#include <ATen/core/Tensor.h>

#include <lockstep/device/autocast.h>

namespace lockstep::shard {

namespace {

bool is_float(const c10::IValue& value) {
  if (value.isTensor())
    return value.toTensor().defined() && value.toTensor().scalar_type() == at::kFloat;
  if (value.isTensorList())
    return std::ranges::any_of(value.toTensorVector(), [](const at::Tensor& tensor) {
      return tensor.defined() && tensor.scalar_type() == at::kFloat;
    });
  return false;
}

// Autocast knows these on GPUs alone.
bool is_norm(const std::string& op) { return op == "aten::layer_norm" || op == "aten::group_norm"; }

void cast_inputs(intercept::Call& call, c10::ScalarType type) {
  torch::jit::Stack& stack = call.stack();
  for (std::size_t i = stack.size() - call.arguments().size(); i < stack.size(); ++i)
    if (stack[i].isTensor() && is_float(stack[i])) stack[i] = stack[i].toTensor().to(type);
}

}  // namespace

void LowPrecisionOperators::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (std::ranges::none_of(call.arguments(), is_float)) return call.proceed();
  const c10::Device device = uses.front().tensor.device();
  if (device.is_cpu() && is_norm(call.op().operator_name().name)) cast_inputs(call, type_);
  const device::Autocast cast(device.type(), type_, device::CastCache::unused);
  call.proceed();
}

}  // namespace lockstep::shard
