#include <lockstep/parallel/tensor/split_owner.h>

#include <ATen/ATen.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/tensor/gathered_view.h>
#include <lockstep/parallel/tensor/operator_rules.h>
#include <lockstep/parallel/tensor/split_operators.h>

namespace lockstep::tensor {

namespace {

// Tensors that lead to somebody else, too, who is to hear of the operator with them in it.
bool is_ours_alone(intercept::Call& call, const SplitOwner& owner) {
  const auto is_foreign = [&](const at::Tensor& tensor) {
    return intercept::is_tagged(tensor) && split_argument(tensor, owner) == nullptr;
  };
  for (const c10::IValue& argument : call.arguments())
    if (argument.isTensor() && is_foreign(argument.toTensor())) return false;
  return true;
}

bool run_on_parts(Rule rule, intercept::Call& call, SplitOwner& owner) {
  switch (rule) {
    case Rule::product: return run_product(call, owner);
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

// A parameter that were given whole memory would be whole again, in silence.
void check_new_memory(intercept::Call& call, const SplitOwner& owner) {
  const auto arguments = call.arguments();
  const Split* const split = split_argument(arguments[0], owner);
  const Split* const given = arguments.size() > 1 ? split_argument(arguments[1], owner) : nullptr;
  if (split != nullptr && given == nullptr)
    throw UsageError("'{}' is cut over {} ranks, and was to be given memory of its own, as "
                     "set_data() and torch::load() do: copy into it with copy_() under a "
                     "torch::NoGradGuard, or use load_full_state_dict()",
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
  if (is_ours_alone(call, *this) && run_on_parts(rule, call, *this)) return;
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

void return_instead(intercept::Call& call, at::Tensor result) {
  torch::jit::drop(call.stack(), call.arguments().size());
  torch::jit::push(call.stack(), std::move(result));
}

std::span<c10::IValue> arguments_of(intercept::Call& call) {
  return std::span(call.stack()).last(call.op().schema().arguments().size());
}

}  // namespace lockstep::tensor
