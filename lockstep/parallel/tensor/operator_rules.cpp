#include <lockstep/parallel/tensor/operator_rules.h>

#include <string>
#include <unordered_map>

namespace lockstep::tensor {

namespace {

using Rules = std::unordered_map<std::string, Rule>;

// Each with the one that works in place, called the same with an underscore: where there is none,
// nobody asks for it.
constexpr const char* kElementWise[] = {
    // One to one.
    "abs", "neg", "sign", "sgn", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
    "rsqrt", "reciprocal", "square", "sin", "cos", "tan", "tanh", "sinh", "cosh", "atan", "asin",
    "acos", "erf", "erfc", "sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "celu",
    "selu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink",
    "softplus", "threshold", "clamp", "clamp_min", "clamp_max", "floor", "ceil", "round", "trunc",
    "frac", "isnan", "isinf", "isfinite", "logical_not", "bitwise_not", "nan_to_num",
    // Two or more to one, broadcast.
    "add", "sub", "rsub", "mul", "div", "pow", "fmod", "remainder", "maximum", "minimum", "fmax",
    "fmin", "atan2", "lerp", "addcmul", "addcdiv", "where", "masked_fill", "eq", "ne", "lt", "le",
    "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_xor", "copysign", "xlogy",
    // Copies and fills.
    "clone", "copy", "_to_copy", "zeros_like", "ones_like", "empty_like", "full_like", "fill",
    "zero", "detach"};

constexpr const char* kViews[] = {
    "t",      "transpose",    "permute", "unsqueeze",      "squeeze",
    "view",   "_unsafe_view", "reshape", "_reshape_alias", "expand",
    "select", "slice",        "unbind",  "split",          "split_with_sizes",
    "alias",  "detach"};

// LibTorch composes them of operators that are in these lists, or that say themselves what they
// gather.
constexpr const char* kMadeOfOthers[] = {
    "linear",        "to",         "contiguous", "flatten",     "unflatten",
    "view_as",       "reshape_as", "expand_as",  "narrow",      "chunk",
    "movedim",       "moveaxis",   "swapaxes",   "swapdims",    "type_as",
    "subtract",      "multiply",   "divide",     "true_divide", "negative",
    "clip",          "absolute",   "greater",    "less",        "feature_dropout",
    "alpha_dropout", "result_type"};

constexpr const char* kDraws[] = {"bernoulli_",   "uniform_", "normal_",     "random_",
                                  "exponential_", "cauchy_",  "log_normal_", "geometric_"};

constexpr const char* kMetadata[] = {"requires_grad_", "_backward",    "data",
                                     "is_leaf",        "output_nr",    "_version",
                                     "retain_grad",    "retains_grad", "is_floating_point",
                                     "is_complex",     "is_conj",      "is_neg",
                                     "_is_zerotensor", "is_signed",    "is_inference",
                                     "size",           "stride",       "sym_size",
                                     "sym_stride",     "sym_numel",    "sym_storage_offset",
                                     "is_same_size"};

// They change sizes in place, or see memory as it lies.
constexpr const char* kRefused[] = {"as_strided", "as_strided_", "resize_",   "resize_as_",
                                    "t_",         "transpose_",  "swapaxes_", "swapdims_",
                                    "squeeze_",   "unsqueeze_"};

Rules all_rules() {
  Rules rules;
  const auto add = [&](const auto& names, Rule rule) {
    for (const std::string name : names) rules["aten::" + name] = rule;
  };
  for (const std::string name : kElementWise) {
    rules["aten::" + name] = Rule::element_wise;
    rules["aten::" + name + "_"] = Rule::element_wise;
  }
  add(kViews, Rule::view);
  add(kMadeOfOthers, Rule::made_of_others);
  add(kDraws, Rule::draw);
  add(kMetadata, Rule::metadata);
  add(kRefused, Rule::refused);
  for (const char* const product : {"aten::mm", "aten::addmm", "aten::matmul"})
    rules[product] = Rule::product;
  rules["aten::embedding"] = Rule::lookup;
  for (const char* const alike : {"aten::new_empty_strided", "aten::new_empty", "aten::new_zeros",
                                  "aten::new_ones", "aten::new_full"})
    rules[alike] = Rule::make_alike;
  rules["aten::dropout"] = rules["aten::dropout_"] = Rule::dropout;
  rules["aten::norm"] = Rule::norm;
  // What set_data() asks before it does anything; in LibTorch 1.13 it is no operator itself.
  rules["aten::_has_compatible_shallow_copy_type"] = Rule::new_memory;
  rules["aten::set_data"] = rules["aten::set_"] = Rule::new_memory;
  return rules;
}

bool is_composed(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
}

bool is_out_variant(const c10::OperatorHandle& op) {
  for (const c10::Argument& argument : op.schema().arguments())
    if (argument.kwarg_only() && argument.alias_info() != nullptr &&
        argument.alias_info()->isWrite())
      return true;
  return false;
}

}  // namespace

Rule rule_of(const c10::OperatorHandle& op) {
  static const Rules rules = all_rules();
  const auto found = rules.find(op.operator_name().name);
  if (found == rules.end() || is_out_variant(op)) return Rule::gather;
  if (found->second == Rule::made_of_others && !is_composed(op)) return Rule::gather;
  return found->second;
}

}  // namespace lockstep::tensor
