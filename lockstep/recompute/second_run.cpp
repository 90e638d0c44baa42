#include <lockstep/recompute/second_run.h>

#include <algorithm>
#include <iterator>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <lockstep/base/error.h>

namespace lockstep::activations {

namespace {

// Thrown through a function that has no more to compute. No std::exception: handlers of errors
// have no business with it.
struct NothingMoreWanted {
  const SecondRun* run;
};

struct Value {
  at::Tensor tensor;
};

// Stands for the node of a result that was not computed again: operators save what has one. The
// graph of a second run is not meant for backward.
class NotComputed : public torch::autograd::Function<NotComputed> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& /*with_gradient*/,
                            at::TensorList /*arguments*/, const Value& value) {
    return value.tensor.tensor_data();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw UsageError(
        "a function that is recomputed goes backward through a result that was kept, and so was "
        "not computed again: keep no results of that kind, or leave this function out");
  }
};

UsageError something_else(std::size_t second, std::size_t first) {
  return UsageError(
      "a function that is recomputed saved {} tensors for backward, and {} the first time: it must "
      "do the same whenever it is called",
      second, first);
}

}  // namespace

// The function may go backward through what it has just computed.
class SecondRun::Saved : public torch::autograd::SavedVariableHooks {
 public:
  explicit Saved(SecondRun& run) : run_(run) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    // Without its node, which would keep itself alive.
    tensor_ = tensor.tensor_data();
    if (!is_parameter(tensor)) run_.save(tensor_);
  }
  at::Tensor call_unpack_hook() override { return tensor_; }

 private:
  SecondRun& run_;
  at::Tensor tensor_;
};

SecondRun::SecondRun(std::vector<Slot>& slots, const std::vector<KeptResult>& results,
                     const OperationKinds& kinds)
    : slots_(slots), results_(results), kinds_(kinds) {
  for (std::size_t i = 0; i < slots.size(); ++i)
    if (slots[i].wanted && slots[i].recomputed()) end_ = i + 1;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SecondRun::make() {
  return std::make_unique<Saved>(*this);
}

void SecondRun::run(const std::function<void()>& function) {
  try {
    const intercept::HookScope hooks(*this);
    const KeeperScope keeper(kinds_.empty() ? nullptr : this);
    function();
  } catch (const NothingMoreWanted& end) {
    if (end.run != this) throw;
  }
  if (!complete()) throw something_else(next_, slots_.size());
}

void SecondRun::save(const at::Tensor& tensor) {
  end_if_complete();
  Slot& slot = slots_[next_];
  if (tensor.sizes() != slot.sizes || tensor.scalar_type() != slot.dtype)
    throw UsageError(
        "a function that is recomputed saved {} of {} for backward where it saved {} of {} the "
        "first time: it must do the same whenever it is called",
        c10::str(tensor.sizes()), c10::toString(tensor.scalar_type()),
        c10::str(at::IntArrayRef(slot.sizes)), c10::toString(slot.dtype));
  if (slot.wanted && slot.recomputed()) slot.tensor = tensor;
  ++next_;
  end_if_complete();
}

void SecondRun::end_if_complete() const {
  if (complete()) throw NothingMoreWanted{this};
}

at::Tensor SecondRun::result(OperationKind, const std::vector<at::Tensor>& arguments,
                             const std::function<at::Tensor()>& operation) {
  if (next_result_ == results_.size() || results_[next_result_].first_slot != next_)
    throw something_else(next_, slots_.size());
  const KeptResult& kept = results_[next_result_++];
  if (!kept.result.defined()) return operation();
  while (next_ < kept.end_slot) {
    const Slot& slot = slots_[next_];
    if (slot.part)
      save(slot.part->of(storage_of(arguments.at(slot.argument))));
    else
      ++next_;
  }
  end_if_complete();
  if (kept.generators) kept.generators->restore();
  const at::Tensor& value = kept.result.checked();
  if (!kept.requires_grad) return value;
  std::vector<at::Tensor> given;
  std::ranges::copy_if(arguments, std::back_inserter(given), &at::Tensor::defined);
  return NotComputed::apply(at::empty({0}).requires_grad_(), at::TensorList(given), Value{value});
}

}  // namespace lockstep::activations
