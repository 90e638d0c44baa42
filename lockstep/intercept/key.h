// How a tensor comes to lead to its owner: a dispatch key that LibTorch itself has no use for, on
// the tensor and on whatever is made from it without a copy.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>

#include <lockstep/intercept/owner.h>

namespace lockstep::intercept {

// No backend of LibTorch's uses it.
inline constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Registers our function under the key, and what memory_readers.h has: the one state of the process
// that we change. The first call also proves that nobody else has the key, and that a tensor that
// carries it leads to its owner. Every function below needs it to have been called.
//
// Failure: UsageError saying who has the key, or what went wrong when it was tried.
void claim_key();

// From now on operators on tensors in this memory lead to `owner`, provided they carry the key. The
// owner is not kept alive: once it is gone, they throw UsageError with `when_gone`, or, where that
// is empty, run as if it had never been. Several owners hear of a call in the order of add_owner().
void add_owner(const c10::Storage& memory, const std::shared_ptr<Owner>& owner,
               std::string when_gone = {});
void remove_owner(const c10::Storage& memory, const Owner* owner);
// Those of a tensor's memory. UsageError, as out of an operator, where one is gone that was not to.
std::vector<std::shared_ptr<Owner>> owners_of(const at::Tensor& tensor);

// Gives a tensor the key, or takes it away. It stays the same object, which its module's members,
// optimizers and autograd refer to.
void tag(const at::Tensor& tensor);
void untag(const at::Tensor& tensor);
bool is_tagged(const at::Tensor& tensor);

// Makes a tensor, which stays the same object, what `other` is: its memory, sizes and type, with
// the key.
void place_tagged(const at::Tensor& tensor, const at::Tensor& other);

}  // namespace lockstep::intercept
