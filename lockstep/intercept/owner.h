// Operators of LibTorch's that touch a tensor of ours come to us before their kernels run, on any
// thread, in forward, backward or recomputation, and without a word from the module that calls
// them.
#pragma once

#include <cstddef>
#include <span>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace lockstep::intercept {

// A tensor argument of a call that leads to an owner.
struct Use {
  at::Tensor tensor;
  bool written = false;  // in place, or as an out= argument
};

class Call;

// Whoever the memory of some tensors belongs to.
//
// Threading: any thread that computes; several at once where the program computes on several.
class Owner {
 public:
  virtual ~Owner() = default;

  // An operator is about to run on tensors of this owner: `uses` are all of them, in the order of
  // the arguments. Does what has to be done and calls call.proceed() or call.decompose(), at most
  // once; or leaves the operator's results on call.stack() in place of its arguments. What it
  // throws comes out of the operator.
  virtual void on_call(Call& call, std::span<const Use> uses) = 0;

  // torch::save(), which calls no operator, is about to copy a tensor's memory into an archive.
  // An owner whose tensors do not always have their values there throws UsageError then, saying
  // what to call instead.
  virtual void on_save(const at::Tensor&) const {}
};

// An operator, its arguments, and who has yet to hear of it.
class Call {
 public:
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  const c10::OperatorHandle& op() const { return op_; }
  c10::DispatchKeySet keys() const { return keys_; }
  torch::jit::Stack& stack() { return stack_; }
  // Valid until proceed().
  std::span<const c10::IValue> arguments() const {
    return std::span(stack_).last(op_.schema().arguments().size());
  }

  // The next owner's turn, or, after the last, the operator itself: its arguments on the stack
  // become its results. Operators inside of it do not come here.
  virtual void proceed() = 0;
  // As proceed(), but operators inside of it do come here: for an operator that is made of others,
  // where these are what an owner wants to hear of.
  virtual void decompose() = 0;

 protected:
  Call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : op_(op), keys_(keys), stack_(stack) {}

 private:
  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
};

}  // namespace lockstep::intercept
