// Decides how an operator on cut tensors runs: by a rule for parts, or on gathered tensors.
#include <lockstep/parallel/tensor/split_tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/nn/tensor_parallel/tensor_moves.h>

namespace lockstep::tensor {

namespace {

// How an operator runs when it is called on cut tensors.
enum class Rule : std::uint8_t {
  gather,          // on gathered tensors: the rule for all operators that are not listed
  product,         // of parts, with a matrix that is cut, or of matrices of which ranks have some
  batched,         // on the matrices of the batch that a rank has
  attention,       // likewise
  joined,          // of parts, along another dim than the cut one
  sum,             // of parts, added up over the ranks along the cut dim
  softmax,         // of parts; along the cut dim with two numbers a row from each rank
  class_loss,      // of scores of which each rank has some classes
  lookup,          // in a part of a table
  view,            // of a part, if the result is cut along one dim
  element_wise,    // on parts, if all are cut alike
  make_alike,      // makes another tensor with the same sizes
  draw,            // draws the whole's random numbers in place and keeps this rank's
  dropout,         // likewise
  norm,            // computed from the norms of parts
  made_of_others,  // the operators that it is made of come here one by one
  metadata,        // looks at no element
  new_memory,      // gives a parameter other memory
  refused,
};

using Rules = std::unordered_map<std::string, Rule>;

// Each stands for its in-place form, too, whose name has an underscore at the end. It does no harm
// where there is none.
constexpr const char* kElementWise[] = {
    // Functions of one tensor.
    "abs", "neg", "sign", "sgn", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt",
    "rsqrt", "reciprocal", "square", "sin", "cos", "tan", "tanh", "sinh", "cosh", "atan", "asin",
    "acos", "erf", "erfc", "sigmoid", "relu", "relu6", "gelu", "silu", "mish", "elu", "celu",
    "selu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "hardshrink", "softshrink",
    "softplus", "threshold", "clamp", "clamp_min", "clamp_max", "floor", "ceil", "round", "trunc",
    "frac", "isnan", "isinf", "isfinite", "logical_not", "bitwise_not", "nan_to_num",
    // Functions of several tensors, which broadcast.
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
    "alias",  "detach",       "repeat"};

// LibTorch makes these of operators that are in these lists, or that are gathered on their own.
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

// These change sizes in place, or look at memory directly.
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
  for (const char* const product : {"aten::bmm", "aten::baddbmm"}) rules[product] = Rule::batched;
  rules["aten::scaled_dot_product_attention"] = Rule::attention;
  rules["aten::cat"] = Rule::joined;
  rules["aten::sum"] = rules["aten::mean"] = Rule::sum;
  rules["aten::softmax"] = rules["aten::log_softmax"] = Rule::softmax;
  for (const char* const loss :
       {"aten::cross_entropy_loss", "aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d"})
    rules[loss] = Rule::class_loss;
  rules["aten::embedding"] = Rule::lookup;
  for (const char* const alike : {"aten::new_empty_strided", "aten::new_empty", "aten::new_zeros",
                                  "aten::new_ones", "aten::new_full"})
    rules[alike] = Rule::make_alike;
  rules["aten::dropout"] = rules["aten::dropout_"] = Rule::dropout;
  rules["aten::norm"] = Rule::norm;
  // set_data() calls the first of these before it does anything; in LibTorch 1.13 it is no
  // operator.
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

Rule rule_of(const c10::OperatorHandle& op) {
  static const Rules rules = all_rules();
  const auto found = rules.find(op.operator_name().name);
  if (found == rules.end() || is_out_variant(op)) return Rule::gather;
  if (found->second == Rule::made_of_others && !is_composed(op)) return Rule::gather;
  return found->second;
}

// The owner of a view that had to be a copy, because its tensor is cut. A view in LibTorch changes
// with its tensor, and the copy does not.
class GatheredView final : public intercept::Owner {
 public:
  GatheredView(const at::Tensor& part, std::string op)
      : part_(part.detach()), version_(part._version()), op_(std::move(op)) {}

  void on_call(intercept::Call& call, std::span<const intercept::Use> uses) override {
    const std::string& called = call.op().operator_name().name;
    for (const intercept::Use& use : uses)
      if (use.written && called != "aten::requires_grad_")
        throw UsageError("{} writes to what {} gave of a tensor that is cut over ranks, and is a "
                         "copy: the tensor itself would not change. Write to a clone(), or to the "
                         "tensor",
                         called, op_);
    check_current(called);
    call.proceed();
  }
  void on_save(const at::Tensor&) const override { check_current("torch::save()"); }

 private:
  void check_current(const std::string& reader) const {
    if (part_._version() != version_)
      throw UsageError("{} uses what {} gave of a tensor that is cut over ranks, and is a copy, "
                       "after that tensor was written to: call {} again",
                       reader, op_, op_);
  }

  at::Tensor part_;
  std::int64_t version_;
  std::string op_;
};

// The original owner of a storage's memory, and the GatheredView that lives as long.
struct Kept {
  c10::DataPtr memory;
  std::shared_ptr<GatheredView> owner;
};

void delete_kept(void* kept) { delete static_cast<Kept*>(kept); }

// From now on it is a UsageError to write to `view`, or to use it after the tensor was written to
// whose part on this rank is `part`.
void guard_view(const at::Tensor& view, const at::Tensor& part, const std::string& op) {
  if (view.numel() == 0 || part.is_inference()) return;
  const auto owner = std::make_shared<GatheredView>(part, op);
  auto* const storage = view.storage().unsafeGetStorageImpl();
  auto kept = std::make_unique<Kept>();
  kept->owner = owner;
  void* const address = storage->data_ptr().get();
  const c10::Device device = storage->data_ptr().device();
  kept->memory = storage->set_data_ptr(c10::DataPtr(address, nullptr, &delete_kept, device));
  storage->set_data_ptr(c10::DataPtr(address, kept.release(), &delete_kept, device));
  intercept::tag(view);
  intercept::add_owner(view.storage(), owner);
}

// The gathered tensors of one call, and the cut tensors that they stand for.
class GatheredArguments {
 public:
  GatheredArguments(intercept::Call& call, SplitOwner& owner) : call_(call), owner_(owner) {}

  void put() {
    const auto arguments = arguments_of(call_);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const auto* const alias = call_.op().schema().arguments()[i].alias_info();
      const bool written = alias != nullptr && alias->isWrite();
      c10::IValue& argument = arguments[i];
      if (argument.isTensor()) {
        if (split_argument(argument, owner_) != nullptr)
          argument = gather(argument.toTensor(), written);
      } else if (argument.isTensorList()) {
        std::vector<at::Tensor> list = argument.toTensorVector();
        for (at::Tensor& tensor : list)
          if (split_argument(tensor, owner_) != nullptr) tensor = gather(tensor, written);
        argument = std::move(list);
      } else if (argument.isList()) {
        auto list = argument.toList().copy();
        for (std::size_t k = 0; k < list.size(); ++k)
          if (const c10::IValue element = list.get(k); split_argument(element, owner_) != nullptr)
            list.set(k, gather(element.toTensor(), written));
        argument = std::move(list);
      }
    }
  }

  // Copies what the operator wrote to the parts.
  void write_back() {
    for (const One& one : all_) {
      if (!one.written) continue;
      if (one.whole.sizes() != one.tensor.sizes())
        throw UsageError("{} changes the sizes of a tensor that is cut over ranks, which comes "
                         "from '{}': call it on what full_tensor() returns",
                         name(), *split_of(one.tensor)->source);
      part_to_write(one.tensor)
          .copy_(take_part(one.whole, split_of(one.tensor)->cut, owner_.axis()));
      was_written(one.tensor);
    }
  }

  // Returns cut tensors in place of gathered ones that were written to, and guards views of
  // gathered ones.
  void check_results() {
    const std::size_t count = call_.op().schema().returns().size();
    for (c10::IValue& result : std::span(call_.stack()).last(count)) {
      if (result.isTensor()) {
        result = checked(result.toTensor());
      } else if (result.isTensorList()) {
        std::vector<at::Tensor> list = result.toTensorVector();
        for (at::Tensor& tensor : list) tensor = checked(tensor);
        result = std::move(list);
      }
    }
  }

 private:
  struct One {
    at::Tensor tensor, whole;
    bool written;
  };

  const std::string& name() const { return call_.op().operator_name().name; }

  at::Tensor gather(const at::Tensor& tensor, bool written) {
    if (split_of(tensor)->is_sum) return add_up(tensor, written);
    if (written) part_to_write(tensor);  // throws if it must not be written to
    all_.push_back({tensor, owner_.gathered(tensor, name()), written});
    return all_.back().whole;
  }

  at::Tensor add_up(const at::Tensor& tensor, bool written) {
    if (written)
      throw UsageError("{} writes to a sum over the ranks that comes from '{}' and is computed "
                       "when it is read: write to a clone()",
                       name(), *split_of(tensor)->source);
    all_.push_back({tensor, whole_of(tensor), false});
    return all_.back().whole;
  }

  at::Tensor checked(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (const One& one : all_) {
      if (one.written && one.whole.is_same(result)) return one.tensor;
      if (result.has_storage() && result.is_alias_of(one.whole))
        guard_view(result, split_of(one.tensor)->part, name());
    }
    return result;
  }

  intercept::Call& call_;
  SplitOwner& owner_;
  std::vector<One> all_;
};

}  // namespace

void run_gathered(intercept::Call& call, SplitOwner& owner) {
  GatheredArguments gathered(call, owner);
  gathered.put();
  call.proceed();
  gathered.write_back();
  gathered.check_results();
}

namespace {

// False if an argument belongs to another owner, too, which has to hear of the call itself.
bool is_ours_alone(intercept::Call& call, const SplitOwner& owner) {
  const auto is_foreign = [&](const at::Tensor& tensor) {
    return intercept::is_tagged(tensor) && split_argument(tensor, owner) == nullptr &&
           !std::ranges::all_of(intercept::owners_of(tensor), &intercept::Owner::only_listens);
  };
  for (const c10::IValue& argument : call.arguments()) {
    if (argument.isTensor() && is_foreign(argument.toTensor())) return false;
    if (argument.isTensorList() && std::ranges::any_of(argument.toTensorVector(), is_foreign))
      return false;
  }
  return true;
}

bool run_on_parts(Rule rule, intercept::Call& call, SplitOwner& owner) {
  switch (rule) {
    case Rule::product: return run_product(call, owner) || run_batched(call, owner);
    case Rule::batched: return run_batched(call, owner);
    case Rule::attention: return run_attention(call, owner);
    case Rule::joined: return run_joined(call, owner);
    case Rule::sum: return run_sum(call, owner);
    case Rule::softmax: return run_softmax(call, owner);
    case Rule::class_loss: return run_class_loss(call, owner);
    case Rule::lookup: return run_lookup(call, owner);
    case Rule::view: return run_view(call, owner);
    case Rule::element_wise: return run_element_wise(call, owner);
    case Rule::make_alike: return run_make_alike(call, owner);
    case Rule::draw: return run_draw(call, owner);
    case Rule::dropout: return run_dropout(call, owner);
    case Rule::norm: return run_norm(call, owner);
    default: return false;
  }
}

// A number times a sum of all ranks' parts, or divided by one, is the sum of scaled parts.
bool run_scaled(intercept::Call& call, SplitOwner& owner) {
  const std::string& op = call.op().operator_name().name;
  const auto arguments = call.arguments();
  if ((op != "aten::mul" && op != "aten::div") || arguments.size() != 2 || !arguments[1].isScalar())
    return false;
  const Split& split = *split_argument(arguments[0], owner);
  torch::jit::Stack stack = {part_to_read(arguments[0].toTensor()), arguments[1]};
  call.op().callBoxed(&stack);
  return_instead(call, make_split({.owner = split.owner,
                                   .part = stack.back().toTensor(),
                                   .source = split.source,
                                   .is_sum = true}));
  return true;
}

// A parameter that is given the memory of a whole would silently be whole again.
void check_new_memory(intercept::Call& call, const SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const split = split_argument(arguments[0], owner);
  const Split* const given = arguments.size() > 1 ? split_argument(arguments[1], owner) : nullptr;
  if (split != nullptr && given == nullptr)
    throw UsageError("'{}' is cut over {} ranks, and was to be given memory of its own, as "
                     "set_data() and torch::load() do: copy into it with copy_() under a "
                     "torch::NoGradGuard, or use load_full_state_dict()",
                     *split->source, owner.axis().size());
  if (split != nullptr && split->trained && !given->part.is_same(split->part))
    throw UsageError("'{}', which is cut over {} ranks, was to be given other memory after "
                     "wrap_model(), as to(device) and to(dtype) do: convert the model before",
                     *split->source, owner.axis().size());
  if (split == nullptr && given != nullptr)
    throw UsageError("a tensor was to be given the memory of '{}', which is cut over {} ranks: "
                     "give it what full_tensor() returns",
                     *given->source, owner.axis().size());
}

[[noreturn]] void refuse(const intercept::Call& call, std::span<const intercept::Use> uses,
                         const SplitOwner& owner) {
  throw UsageError("{} cannot be called on a tensor that is cut over {} ranks, which comes from "
                   "'{}': call it on what full_tensor() returns",
                   call.op().operator_name().name, owner.axis().size(),
                   *split_of(uses.front().tensor)->source);
}

}  // namespace

SplitOwner::SplitOwner(std::shared_ptr<comm::Communicator> group)
    : axis_(std::move(group)), gathers_(axis_.rank() == 0) {}

at::Tensor SplitOwner::gathered(const at::Tensor& tensor, const std::string& op) {
  gathers_.add(op, *split_of(tensor)->source,
               tensor.numel() * static_cast<std::int64_t>(tensor.element_size()));
  return whole_of(tensor);
}

void SplitOwner::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  const Rule rule = rule_of(call.op());
  if (rule == Rule::refused) refuse(call, uses, *this);
  if (rule == Rule::new_memory) check_new_memory(call, *this);
  if (rule == Rule::metadata || rule == Rule::made_of_others || rule == Rule::new_memory) {
    call.decompose();
    return;
  }
  const bool of_sums = std::ranges::any_of(
      uses, [](const intercept::Use& use) { return split_of(use.tensor)->is_sum; });
  if (of_sums && run_scaled(call, *this)) return;
  if (!of_sums && is_ours_alone(call, *this) && run_on_parts(rule, call, *this)) return;
  run_gathered(call, *this);
}

void SplitOwner::on_save(const at::Tensor& tensor) const {
  throw UsageError(
      "torch::save() was given a tensor that is cut over {} ranks and comes from '{}': "
      "write what full_tensor() gives of it, or full_state_dict()",
      axis_.size(), *split_of(tensor)->source);
}

const Split* split_argument(const c10::IValue& argument, const SplitOwner& owner) {
  const Split* const split = argument.isTensor() ? split_of(argument.toTensor()) : nullptr;
  return split != nullptr && split->owner.get() == &owner ? split : nullptr;
}

void return_instead(intercept::Call& call, c10::IValue result) {
  torch::jit::drop(call.stack(), call.arguments().size());
  torch::jit::push(call.stack(), std::move(result));
}

std::span<c10::IValue> arguments_of(intercept::Call& call) {
  return std::span(call.stack()).last(call.op().schema().arguments().size());
}

}  // namespace lockstep::tensor
