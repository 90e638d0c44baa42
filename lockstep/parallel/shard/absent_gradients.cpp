#include <lockstep/parallel/shard/absent_gradients.h>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <lockstep/base/error.h>
#include <lockstep/intercept/owner.h>
#include <lockstep/parallel/shard/flat_unit.h>

namespace lockstep::shard {

namespace {

bool in_backward() { return torch::autograd::get_current_graph_task_nodes_in_graph() != nullptr; }

// In place of an operator that works on its first argument, which is its result.
void return_first(intercept::Call& call) {
  const std::size_t count = call.arguments().size();
  c10::IValue first = call.arguments().front();
  torch::jit::drop(call.stack(), count);
  torch::jit::push(call.stack(), std::move(first));
}

}  // namespace

std::shared_ptr<AbsentGradients> AbsentGradients::make(const std::vector<NamedTensor>& parameters) {
  const c10::NoGradGuard no_grad;
  auto made = std::make_shared<AbsentGradients>();
  for (const auto& [name, parameter] : parameters) {
    Entry& entry = made->entries_.emplace_back();
    entry.name = name;
    entry.stand_in = tensor_without_memory(
        parameter.sizes(),
        at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device()));
    intercept::tag(entry.stand_in);
    const c10::Storage& memory = entry.stand_in.storage();
    made->by_memory_[memory.unsafeGetStorageImpl()] = made->entries_.size() - 1;
    intercept::add_owner(memory, made,
                         fmt::format("the gradient of '{}' was cut among the ranks by a manager "
                                     "that is gone",
                                     name));
  }
  return made;
}

void AbsentGradients::put(std::size_t index, const at::Tensor& parameter) const {
  parameter.mutable_grad() = entries_[index].stand_in;
}

bool AbsentGradients::is_in(std::size_t index, const at::Tensor& parameter) const {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().is_alias_of(entries_[index].stand_in.storage());
}

void AbsentGradients::on_call(intercept::Call& call, std::span<const intercept::Use> uses) {
  const std::string& op = call.op().operator_name().name;
  Entry& entry = entries_[by_memory_.at(uses.front().tensor.storage().unsafeGetStorageImpl())];
  if (op == "aten::detach" || op == "aten::alias" || op == "aten::view_as") {
    call.proceed();
  } else if (op == "aten::detach_" || op == "aten::requires_grad_") {
    return_first(call);
  } else if (op == "aten::zero_") {
    entry.zeroed = true;
    return_first(call);
  } else if (op == "aten::add_" && in_backward() && uses.size() == 1 && uses.front().written) {
    // Autograd adds what has come: whoever hears of gradients gets it, too.
    return_first(call);
  } else {
    throw UsageError("{} was called on the gradient of '{}', which is cut among the ranks: step "
                     "with the optimizer of make_optimizer(), clip with clip_gradients(), and look "
                     "at it with full_gradient()",
                     op, entry.name);
  }
}

void AbsentGradients::on_save(const at::Tensor& tensor) const {
  throw UsageError("torch::save() was given the gradient of '{}', which is cut among the ranks: "
                   "write what full_gradient() returns",
                   entries_[by_memory_.at(tensor.storage().unsafeGetStorageImpl())].name);
}

}  // namespace lockstep::shard
