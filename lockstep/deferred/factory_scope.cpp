#include <lockstep/deferred/factory_scope.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/deferred/operator_traits.h>
#include <lockstep/intercept/owner.h>

namespace lockstep::deferred {

namespace {

thread_local Factory* current_factory = nullptr;

struct Wanted {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  at::ScalarType dtype;
};

// The type of an ordinary tensor, read from the arguments that two factories have in common, which
// all other factories call. The arguments begin at index `first`.
std::optional<at::ScalarType> ordinary_type(at::ArrayRef<c10::IValue> arguments,
                                            std::size_t first) {
  const c10::IValue& dtype = arguments[first];
  const c10::IValue& layout = arguments[first + 1];
  const c10::IValue& device = arguments[first + 2];
  const c10::IValue& pinned = arguments[first + 3];
  if (!layout.isNone() && layout.toLayout() != at::kStrided) return std::nullopt;
  if (!device.isNone() && !device.toDevice().is_cpu()) return std::nullopt;
  if (!pinned.isNone() && pinned.toBool()) return std::nullopt;
  return dtype.isNone() ? c10::get_default_dtype_as_scalartype() : dtype.toScalarType();
}

std::vector<std::int64_t> contiguous_strides(const std::vector<std::int64_t>& sizes) {
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  return strides;
}

std::optional<Wanted> wanted(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const auto& schema = op.schema();
  if (schema.name() == "aten::empty" && schema.overload_name() == "memory_format") {
    const c10::IValue& format = arguments[5];
    if (!format.isNone() && format.toMemoryFormat() != at::MemoryFormat::Contiguous)
      return std::nullopt;
    const auto dtype = ordinary_type(arguments, 1);
    if (!dtype) return std::nullopt;
    const auto sizes = arguments[0].toIntVector();
    return Wanted{sizes, contiguous_strides(sizes), *dtype};
  }
  if (schema.name() == "aten::empty_strided" && schema.overload_name().empty()) {
    const auto dtype = ordinary_type(arguments, 2);
    if (!dtype) return std::nullopt;
    return Wanted{arguments[0].toIntVector(), arguments[1].toIntVector(), *dtype};
  }
  return std::nullopt;
}

}  // namespace

FactoryScope::FactoryScope(Factory& factory) : mode_(this) {
  if (current_factory != nullptr)
    throw UsageError("a deferred construction began inside of another on the same thread: let the "
                     "outer one construct all of the model");
  current_factory = &factory;
}

FactoryScope::~FactoryScope() { current_factory = nullptr; }

Factory* FactoryScope::current() { return current_factory; }

void FactoryScope::on_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                               torch::jit::Stack* stack) {
  // Redispatches with this key set and without a guard, because the operators inside have to come
  // here, too.
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, intercept::kMode);
  // A call on a tensor with an owner goes to the owner next.
  if (keys.has(intercept::kKey)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const std::size_t num_arguments = op.schema().arguments().size();
  if (const auto request = wanted(op, torch::jit::last(*stack, num_arguments))) {
    const at::Tensor tensor =
        current_factory->make(request->sizes, request->strides, request->dtype);
    if (tensor.defined()) {
      torch::jit::drop(*stack, num_arguments);
      torch::jit::push(*stack, tensor);
      return;
    }
  }
  if (is_made_of_factories(op)) {
    op.redispatchBoxed(below, stack);
  } else {
    const PlainFactories inside;
    op.redispatchBoxed(below, stack);
  }
}

}  // namespace lockstep::deferred
