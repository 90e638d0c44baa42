#include <lockstep/parallel/shard/low_precision_operators.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

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
bool autocast_lacks(const std::string& op) {
  static const std::unordered_set<std::string> names = {"aten::layer_norm", "aten::group_norm",
                                                        "aten::lstm",       "aten::gru",
                                                        "aten::rnn_tanh",   "aten::rnn_relu"};
  return names.contains(op);
}

c10::IValue cast(const c10::IValue& value, c10::ScalarType type) {
  if (value.isTensor()) return value.toTensor().to(type);
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors)
    if (tensor.defined() && tensor.scalar_type() == at::kFloat) tensor = tensor.to(type);
  return tensors;
}

void cast_inputs(intercept::Call& call, c10::ScalarType type) {
  torch::jit::Stack& stack = call.stack();
  for (std::size_t i = stack.size() - call.arguments().size(); i < stack.size(); ++i)
    if (is_float(stack[i])) stack[i] = cast(stack[i], type);
}

}  // namespace

void LowPrecisionOperators::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  if (std::ranges::none_of(call.arguments(), is_float)) return call.proceed();
  const c10::Device device = uses.front().tensor.device();
  if (device.is_cpu() && autocast_lacks(call.op().operator_name().name)) cast_inputs(call, type_);
  const device::Autocast autocast(device.type(), type_, device::CastCache::unused);
  call.proceed();
}

}  // namespace lockstep::shard
