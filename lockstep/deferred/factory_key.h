// While a scope of this thread's lasts, the operators that make tensors come to us: through a
// dispatch key that LibTorch itself has no use for, which the scope turns on for the thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace lockstep::deferred {

inline constexpr auto kFactoryKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Makes tensors in LibTorch's stead.
class Factory {
 public:
  virtual ~Factory() = default;

  // An uninitialised tensor of the CPU. Undefined leaves it to LibTorch.
  virtual at::Tensor make(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) = 0;
};

// Registers our function under the key; the first call also proves that nobody else has it.
//
// Failure: UsageError saying who has the key.
void claim_factory_key();

// Factories of this thread lead to `factory`, which outlives the scope, when they are called by the
// program or by an operator that is made of others. Kernels that take memory for themselves to
// write to do not. Factories of other threads, of other devices, of pinned memory and of memory
// formats other than contiguous do not either.
//
// Failure: UsageError where the thread is in such a scope already.
class FactoryScope {
 public:
  explicit FactoryScope(Factory& factory);
  ~FactoryScope();
  FactoryScope(const FactoryScope&) = delete;
  FactoryScope& operator=(const FactoryScope&) = delete;

  // The factory of the scope that this thread is in, or null.
  static Factory* current();

 private:
  c10::impl::IncludeDispatchKeyGuard included_;
};

// Within this one, and so within a scope, factories are LibTorch's.
class PlainFactories {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{kFactoryKey};
};

}  // namespace lockstep::deferred
