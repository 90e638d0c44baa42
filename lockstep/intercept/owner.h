// Operators that touch a tensor of ours come to its owner before their kernels run: on any thread,
// in forward, backward or recomputation, and without the module that calls them knowing.
//
// A tensor leads to its owner by a dispatch key that LibTorch itself does not use, on the tensor
// and on whatever is made from it without a copy.
#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKey.h>

namespace lockstep::intercept {

// A tensor argument of a call, which leads to an owner.
struct Use {
  at::Tensor tensor;
  bool written = false;  // in place, or as an out= argument
};

class Call;

// The owner of the memory of some tensors.
//
// Threading: called on any thread that computes, on several at once where several compute.
class Owner {
 public:
  virtual ~Owner() = default;

  // An operator is about to run on tensors of this owner: `uses` are all of them, in the order of
  // the arguments. The owner acts and calls call.proceed() or call.decompose(), at most once; or it
  // puts the operator's results on call.stack() in place of its arguments. The operator throws
  // what this throws.
  virtual void on_call(Call& call, std::span<const Use> uses) = 0;

  // Whether another owner may run other operators in a call's place: this one hears of those that
  // use its tensors, and needs no more.
  virtual bool only_listens() const { return false; }

  // torch::save(), which calls no operator, is about to copy a tensor's memory into an archive. An
  // owner whose tensors do not always have their values in memory throws UsageError, which says
  // what to call instead.
  virtual void on_save(const at::Tensor&) const {}
};

// An owner of parameters that show themselves whole, while each rank has a part of them.
class PartOwner : public Owner {
 public:
  // The part on this rank, an ordinary leaf, the same one at every call. From the first call on
  // gradients go to the part, and no longer to the parameter.
  virtual at::Tensor train_part(const at::Tensor& parameter) = 0;
  // A gradient of the part as one of the parameter; they share memory.
  virtual at::Tensor shown_gradient(const at::Tensor& parameter,
                                    const at::Tensor& of_part) const = 0;
};

// An operator that was called, its arguments, and the owners that have not had their turn yet.
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

  // Calls the next owner or, after the last one, runs the operator: its arguments on the stack
  // become its results. Operators that it calls inside do not come to owners.
  virtual void proceed() = 0;
  // As proceed(), but the operators that it calls inside do come to owners: for an operator that is
  // made of others, where the owner wants to hear of those.
  virtual void decompose() = 0;

 protected:
  Call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack& stack)
      : op_(op), keys_(keys), stack_(stack) {}

 private:
  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_;
  torch::jit::Stack& stack_;
};

// Keeps what an owner throws on this thread while it lives: for calls of code that makes errors of
// another type of it, as TorchScript's interpreter does.
class [[nodiscard]] KeptError {
 public:
  KeptError();
  ~KeptError();
  KeptError(const KeptError&) = delete;
  KeptError& operator=(const KeptError&) = delete;

  // Throws the last one.
  void rethrow_if_any() const;

 private:
  std::exception_ptr error_;
  std::exception_ptr* outer_;
};

// No backend of LibTorch uses this key.
inline constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Registers our function under the key, and two functions for code that reads a tensor's memory
// without an operator; this is state of the whole process. The first call also proves that no other
// library uses the key, and that a tensor with the key leads to its owner. It has to be called
// before every function below.
//
// - torch::save() of anything that holds a tensor of ours asks the owner first (on_save). It would
//   write next to nothing of a tensor whose memory is not there.
// - data_ptr<T>() asks nobody, and fails with LibTorch's error where there is no memory. That error
//   now begins with how to read the values. pickle_save() asks nobody either, and writes nothing.
//
// LibTorch has one of each function for the process (SetExportModuleExtraFilesHook,
// SetStackTraceFetcher): ours replaces any that was set before.
//
// Failure: UsageError saying who has the key, or what went wrong in the trial.
void claim_key();

// From now on, operators on tensors in this memory come to `owner` if the tensors carry the key.
// The owner is not kept alive. Once it is destroyed, these operators throw UsageError with
// `when_gone`, or, if that is empty, run as if there had been no owner. Several owners hear of a
// call in the order of add_owner(), but for those whose turn is to come first.
enum class Turn { first, last };
void add_owner(const c10::Storage& memory, const std::shared_ptr<Owner>& owner,
               std::string when_gone = {}, Turn turn = Turn::last);
void remove_owner(const c10::Storage& memory, const Owner* owner);
// The owners of a tensor's memory. UsageError as from an operator, for an owner that is destroyed.
std::vector<std::shared_ptr<Owner>> owners_of(const at::Tensor& tensor);
// The one that shows a parameter whole; null where the parameter has memory of its own.
std::shared_ptr<PartOwner> part_owner_of(const at::Tensor& parameter);

// Gives a tensor the key, or takes it away. The tensor stays the same object, so that its module,
// optimizers and autograd still refer to it.
void tag(const at::Tensor& tensor);
void untag(const at::Tensor& tensor);
bool is_tagged(const at::Tensor& tensor);

// Gives a tensor the memory, sizes and type of `other`, and the key. It stays the same object.
void place_tagged(const at::Tensor& tensor, const at::Tensor& other);

}  // namespace lockstep::intercept
