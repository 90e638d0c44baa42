#include <lockstep/deferred/operator_traits.h>

#include <algorithm>
#include <string_view>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/enum_tag.h>

#include <lockstep/deferred/factory_scope.h>
#include <lockstep/deferred/record.h>

namespace lockstep::deferred {

namespace {

using Names = std::unordered_set<std::string_view>;

bool is_one_of(const Names& names, const c10::OperatorHandle& op) {
  return names.count(op.schema().name()) != 0;
}

bool has_kernel_of_its_own(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
         !has_kernel_of_its_own(op);
}

// Decides by the operator's kernels: it is composed of others, which have gradients of their own.
bool is_made_of_others(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !has_kernel_of_its_own(op);
}

bool writes(const c10::OperatorHandle& op) {
  const std::size_t num_arguments = op.schema().arguments().size();
  for (std::size_t i = 0; i < num_arguments; ++i)
    if (is_written(op, i)) return true;
  return false;
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::TensorType;
}

// Operators that LibTorch composes of factories, and that read only a tensor's shape.
const Names& makes_one_alike() {
  static const Names names = {"aten::empty_like",   "aten::zeros_like", "aten::ones_like",
                              "aten::full_like",    "aten::rand_like",  "aten::randn_like",
                              "aten::randint_like", "aten::new_empty",  "aten::new_zeros",
                              "aten::new_ones",     "aten::new_full",   "aten::new_empty_strided"};
  return names;
}

const Names& copies_one() {
  static const Names names = {"aten::clone", "aten::_to_copy"};
  return names;
}

// These change only the shape, in place.
const Names& reshapes_in_place() {
  static const Names names = {"aten::t_",         "aten::transpose_",  "aten::squeeze_",
                              "aten::unsqueeze_", "aten::as_strided_", "aten::detach_"};
  return names;
}

// The kernels of these operators never reject a number that they drew.
const Names& fills_with_random_numbers() {
  static const Names names = {"aten::uniform_",     "aten::normal_", "aten::random_",
                              "aten::exponential_", "aten::cauchy_", "aten::log_normal_",
                              "aten::geometric_"};
  return names;
}

const Names& fills() {
  static const Names names = {"aten::fill_", "aten::zero_", "aten::copy_"};
  return names;
}

// If the probabilities are a tensor, bernoulli_ has another overload, which reads them.
bool is_bernoulli_of_one_probability(const c10::OperatorHandle& op) {
  return op.schema().name() == "aten::bernoulli_" && op.schema().overload_name() == "float";
}

}  // namespace

bool decomposes(const c10::OperatorHandle& op) {
  return is_made_of_others(op) ||
         (is_composite(op) && (is_one_of(makes_one_alike(), op) || is_one_of(copies_one(), op)));
}

bool is_made_of_factories(const c10::OperatorHandle& op) {
  if (is_made_of_others(op)) return true;
  if (!is_composite(op)) return false;
  const auto& arguments = op.schema().arguments();
  return is_one_of(makes_one_alike(), op) ||
         std::none_of(arguments.begin(), arguments.end(), is_tensor);
}

bool touches_no_element(const c10::OperatorHandle& op) {
  if (is_one_of(reshapes_in_place(), op)) return true;
  const auto& returns = op.schema().returns();
  return !writes(op) && !returns.empty() &&
         std::all_of(returns.begin(), returns.end(), [](const c10::Argument& returned) {
           return returned.alias_info() != nullptr;
         });
}

bool only_writes_arguments(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return writes(op) && !op.hasTag(at::Tag::inplace_view) &&
         op.schema().name().find("aten::resize") == std::string::npos &&
         op.schema().name() != "aten::set_" &&
         std::all_of(returns.begin(), returns.end(), [](const c10::Argument& returned) {
           return returned.alias_info() != nullptr && returned.alias_info()->isWrite();
         });
}

bool only_returns_new_tensors(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  return !writes(op) && !returns.empty() && !op.hasTag(at::Tag::dynamic_output_shape) &&
         !op.hasTag(at::Tag::data_dependent_output) &&
         std::all_of(returns.begin(), returns.end(), [](const c10::Argument& returned) {
           return is_tensor(returned) && returned.alias_info() == nullptr;
         });
}

bool is_written(const c10::OperatorHandle& op, std::size_t argument) {
  const auto* const alias = op.schema().arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

bool is_out(const c10::OperatorHandle& op, std::size_t argument) {
  return is_written(op, argument) && op.schema().arguments()[argument].kwarg_only();
}

bool is_overwritten(const c10::OperatorHandle& op, std::size_t argument) {
  return is_out(op, argument) ||
         (is_written(op, argument) && (is_one_of(fills(), op) || draws_by_shape(op)));
}

bool is_random(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::nondeterministic_seeded) || generator_argument(op).has_value();
}

bool draws_by_shape(const c10::OperatorHandle& op) {
  return generator_argument(op).has_value() &&
         (is_one_of(fills_with_random_numbers(), op) || is_bernoulli_of_one_probability(op));
}

std::optional<std::size_t> generator_argument(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  const auto found =
      std::find_if(arguments.begin(), arguments.end(),
                   [](const c10::Argument& argument) { return argument.name() == "generator"; });
  if (found == arguments.end()) return std::nullopt;
  return static_cast<std::size_t>(found - arguments.begin());
}

namespace {

at::Tensor without_elements(const at::Tensor& tensor) {
  at::Tensor shape = at::empty_strided(tensor.sizes(), tensor.strides(),
                                       tensor.options().device(at::kMeta).requires_grad(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    shape.unsafeGetTensorImpl()->set_wrapped_number(true);
  return shape;
}

c10::IValue on_meta(const c10::IValue& argument) {
  if (argument.isDevice()) return c10::Device(c10::kMeta);
  c10::IValue shapes = with_own_lists(argument);
  for_each_tensor(argument, [&](const at::Tensor& tensor, auto element) {
    set_tensor(shapes, element, without_elements(tensor));
  });
  return shapes;
}

}  // namespace

InferredShapes infer_shapes(const c10::OperatorHandle& op, std::span<const c10::IValue> arguments) {
  const AsIs as_is;
  InferredShapes inferred;
  try {
    for (const c10::IValue& argument : arguments) inferred.arguments.push_back(on_meta(argument));
    inferred.results = inferred.arguments;
    op.callBoxed(&inferred.results);
    inferred.outcome = InferredShapes::Outcome::known;
  } catch (const c10::NotImplementedError&) {
    inferred.outcome = InferredShapes::Outcome::unknown;
  } catch (const std::exception&) {
    inferred.outcome = InferredShapes::Outcome::failed;
  }
  return inferred;
}

}  // namespace lockstep::deferred
